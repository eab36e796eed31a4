// What passes between two processes that try out the way between them.
#include "xla_ffi/transport/trial.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/cc/two_sides.h"

namespace jaxhetero {
namespace {

class TrialTest : public testing::Test {
 protected:
  void SetUp() override {
    test_fabric_library();
    Result<std::unique_ptr<TrialServer>> server = TrialServer::start(*resolve("127.0.0.1", 0), bytes_of("secret"));
    ASSERT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(*server);
  }

  [[nodiscard]] Result<TrialResult> run(const std::string& fabric, const std::string& token = "secret") const {
    const TrialSettings settings{*resolve("127.0.0.1", 0), bytes_of(token), fabric, milliseconds(50), kPatience};
    return run_trial(*resolve("127.0.0.1", server_->port()), settings);
  }

  std::unique_ptr<TrialServer> server_;
};

TEST_F(TrialTest, SendsOverTheSocketAndOverAFabricOneAfterTheOther) {
  for (const std::string& fabric : {std::string("off"), test_provider()}) {
    Result<TrialResult> result = run(fabric);
    ASSERT_TRUE(result.ok()) << result.status().message();
    EXPECT_EQ(result->provider, fabric == "off" ? "" : fabric);
    EXPECT_GT(result->bytes_per_s, 0);
  }
}

TEST_F(TrialTest, SaysWhyBytesDoNotGoOverAFabric) {
  EXPECT_NE(run("nowhere").status().message().find("there is no provider nowhere here"), std::string::npos);
}

TEST_F(TrialTest, TakesNothingFromWhoDoesNotKnowTheToken) {
  EXPECT_EQ(run("off", "another").status().code(), Code::kUnauthenticated);
}

TEST_F(TrialTest, EndsAPeerThatSendsAnythingElse) {
  RawPeer peer(*resolve("127.0.0.1", server_->port()));
  peer.prove_token("secret");
  peer.send(frame_bytes(header_of(FrameType::kRegister), {}));
  EXPECT_TRUE(peer.is_closed_within(kPatience));
}

}  // namespace
}  // namespace jaxhetero
