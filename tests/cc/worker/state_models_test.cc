// Which model of an optimizer a store of weights is for.
#include "xla_ffi/worker/state_models.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>

namespace jaxhetero {
namespace {

TEST(StateModels, EachInitMakesAModelUpToTheMost) {
  StateModels models;
  std::set<uint64_t> numbers;
  for (uint32_t model = 0; model < StateModels::kMost; ++model) {
    const uint32_t version = models.start(7, StateModels::kNew);
    EXPECT_EQ(StateModels::model_of(version), model);
    numbers.insert(StateModels::number_for(7, version));
  }
  EXPECT_EQ(numbers.size(), StateModels::kMost);
  EXPECT_EQ(StateModels::model_of(models.start(7, StateModels::kNew)), 0);
  EXPECT_EQ(StateModels::model_of(models.start(8, StateModels::kNew)), 0);
}

TEST(StateModels, APushTakesThePlaceOfTheLatestModelOrOfThatOfItsState) {
  StateModels models;
  EXPECT_EQ(StateModels::model_of(models.start(7, StateModels::kLatest)), 0);
  const uint32_t first = models.start(7, StateModels::kLatest);
  EXPECT_EQ(StateModels::model_of(first), 0);
  EXPECT_EQ(StateModels::model_of(models.start(7, StateModels::kNew)), 1);
  EXPECT_EQ(StateModels::model_of(models.start(7, StateModels::kLatest)), 1);
  EXPECT_EQ(StateModels::model_of(models.start(7, first + 3)), 0);
}

// One that has come to an elastic job makes the same next model as the others.
TEST(StateModels, AWorkerThatHasComeKnowsModelsByTheirVersions) {
  StateModels models;
  StateModels of_comer;
  const uint32_t first = models.start(7, StateModels::kNew);
  const uint32_t second = models.start(7, StateModels::kNew);
  of_comer.note(7, second + 5);
  of_comer.note(7, first + 5);
  EXPECT_EQ(of_comer.start(7, StateModels::kNew), models.start(7, StateModels::kNew));
}

TEST(StateModels, NoVersionOfAStoreIsNearThatOfAnother) {
  StateModels models;
  const uint32_t first = models.start(7, StateModels::kNew);
  const uint32_t again = models.start(7, first + 1000);
  EXPECT_GE(again - first, 1U << 24);
}

}  // namespace
}  // namespace jaxhetero
