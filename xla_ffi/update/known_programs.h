// The programs that have fused kernels, as jaxhetero/optimizers/_programs makes them of optax. Written by
// `python xla_ffi/update/known_programs.py`; tests/optimizers/test_updates.py tells when one is no more what optax
// makes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "xla_ffi/update/program.h"

namespace jaxhetero::known {

template <size_t kSteps, size_t kResults>
struct KnownProgram {
  std::string_view name;
  uint16_t input_count = 0;
  uint16_t scalar_count = 0;
  uint16_t temporary_count = 0;
  std::array<Instruction, kSteps> steps;
  std::array<Slot, kResults> results;
};

using enum Opcode;

// BEGIN
inline constexpr KnownProgram<2, 1> kSgd = {"sgd", 2, 1, 1, {{{kMul, 3, 2, 0, 0}, {kAdd, 3, 1, 3, 0}}}, {3}};
inline constexpr KnownProgram<4, 2> kMomentum = {
    "momentum", 3, 2, 2, {{{kMul, 5, 3, 2, 0}, {kAdd, 5, 0, 5, 0}, {kMul, 6, 4, 5, 0}, {kAdd, 6, 1, 6, 0}}}, {6, 5}};
inline constexpr KnownProgram<6, 2> kNesterov = {"nesterov",
                                                 3,
                                                 2,
                                                 2,
                                                 {{{kMul, 5, 3, 2, 0},
                                                   {kAdd, 5, 0, 5, 0},
                                                   {kMul, 6, 3, 5, 0},
                                                   {kAdd, 6, 0, 6, 0},
                                                   {kMul, 6, 4, 6, 0},
                                                   {kAdd, 6, 1, 6, 0}}},
                                                 {6, 5}};
inline constexpr KnownProgram<15, 3> kAdam = {"adam",
                                              4,
                                              9,
                                              4,
                                              {{{kMul, 13, 4, 0, 0},
                                                {kMul, 14, 5, 2, 0},
                                                {kAdd, 13, 13, 14, 0},
                                                {kMul, 14, 0, 0, 0},
                                                {kMul, 14, 6, 14, 0},
                                                {kMul, 15, 7, 3, 0},
                                                {kAdd, 14, 14, 15, 0},
                                                {kMul, 15, 13, 8, 0},
                                                {kMul, 16, 14, 9, 0},
                                                {kAdd, 16, 16, 10, 0},
                                                {kSqrt, 16, 16, 0, 0},
                                                {kAdd, 16, 16, 11, 0},
                                                {kDiv, 15, 15, 16, 0},
                                                {kMul, 15, 12, 15, 0},
                                                {kAdd, 15, 1, 15, 0}}},
                                              {15, 13, 14}};
inline constexpr KnownProgram<17, 3> kAdamw = {"adamw",
                                               4,
                                               10,
                                               4,
                                               {{{kMul, 14, 4, 0, 0},
                                                 {kMul, 15, 5, 2, 0},
                                                 {kAdd, 14, 14, 15, 0},
                                                 {kMul, 15, 0, 0, 0},
                                                 {kMul, 15, 6, 15, 0},
                                                 {kMul, 16, 7, 3, 0},
                                                 {kAdd, 15, 15, 16, 0},
                                                 {kMul, 16, 14, 8, 0},
                                                 {kMul, 17, 15, 9, 0},
                                                 {kAdd, 17, 17, 10, 0},
                                                 {kSqrt, 17, 17, 0, 0},
                                                 {kAdd, 17, 17, 11, 0},
                                                 {kDiv, 16, 16, 17, 0},
                                                 {kMul, 17, 12, 1, 0},
                                                 {kAdd, 16, 16, 17, 0},
                                                 {kMul, 16, 13, 16, 0},
                                                 {kAdd, 16, 1, 16, 0}}},
                                               {16, 14, 15}};
inline constexpr KnownProgram<17, 2> kLambSums = {"lamb, sums",
                                                  4,
                                                  9,
                                                  3,
                                                  {{{kMul, 13, 4, 0, 0},
                                                    {kMul, 14, 5, 2, 0},
                                                    {kAdd, 13, 13, 14, 0},
                                                    {kMul, 14, 0, 0, 0},
                                                    {kMul, 14, 6, 14, 0},
                                                    {kMul, 15, 7, 3, 0},
                                                    {kAdd, 14, 14, 15, 0},
                                                    {kMul, 13, 13, 8, 0},
                                                    {kMul, 14, 14, 9, 0},
                                                    {kAdd, 14, 14, 10, 0},
                                                    {kSqrt, 14, 14, 0, 0},
                                                    {kAdd, 14, 14, 11, 0},
                                                    {kDiv, 13, 13, 14, 0},
                                                    {kMul, 14, 12, 1, 0},
                                                    {kAdd, 13, 13, 14, 0},
                                                    {kMul, 14, 1, 1, 0},
                                                    {kMul, 13, 13, 13, 0}}},
                                                  {14, 13}};
inline constexpr KnownProgram<18, 3> kLamb = {"lamb",
                                              4,
                                              11,
                                              4,
                                              {{{kMul, 15, 4, 0, 0},
                                                {kMul, 16, 5, 2, 0},
                                                {kAdd, 15, 15, 16, 0},
                                                {kMul, 16, 0, 0, 0},
                                                {kMul, 16, 6, 16, 0},
                                                {kMul, 17, 7, 3, 0},
                                                {kAdd, 16, 16, 17, 0},
                                                {kMul, 17, 15, 8, 0},
                                                {kMul, 18, 16, 9, 0},
                                                {kAdd, 18, 18, 10, 0},
                                                {kSqrt, 18, 18, 0, 0},
                                                {kAdd, 18, 18, 11, 0},
                                                {kDiv, 17, 17, 18, 0},
                                                {kMul, 18, 12, 1, 0},
                                                {kAdd, 17, 17, 18, 0},
                                                {kMul, 17, 17, 13, 0},
                                                {kMul, 17, 14, 17, 0},
                                                {kAdd, 17, 1, 17, 0}}},
                                              {17, 15, 16}};
inline constexpr KnownProgram<2, 2> kLarsSums = {"lars, sums", 3, 0, 2, {{{kMul, 3, 1, 1, 0}, {kMul, 4, 0, 0, 0}}},
                                                 {3, 4}};
inline constexpr KnownProgram<7, 2> kLars = {"lars",
                                             3,
                                             4,
                                             2,
                                             {{{kMul, 7, 3, 1, 0},
                                               {kAdd, 7, 0, 7, 0},
                                               {kMul, 7, 4, 7, 0},
                                               {kMul, 7, 5, 7, 0},
                                               {kMul, 8, 6, 2, 0},
                                               {kAdd, 7, 7, 8, 0},
                                               {kAdd, 8, 1, 7, 0}}},
                                             {8, 7}};
inline constexpr KnownProgram<4, 2> kLarsWithoutDecay = {
    "lars, without decay",
    3,
    2,
    2,
    {{{kMul, 5, 3, 0, 0}, {kMul, 6, 4, 2, 0}, {kAdd, 5, 5, 6, 0}, {kAdd, 6, 1, 5, 0}}},
    {6, 5}};
inline constexpr KnownProgram<2, 1> kAdamClippedSums = {
    "adam, clipped, sums", 4, 1, 1, {{{kMul, 5, 0, 0, 0}, {kAdd, 5, 5, 4, 0}}}, {5}};
inline constexpr KnownProgram<18, 3> kAdamClipped = {"adam, clipped",
                                                     4,
                                                     12,
                                                     4,
                                                     {{{kMul, 16, 0, 4, 0},
                                                       {kMul, 16, 16, 5, 0},
                                                       {kSelect, 16, 6, 0, 16},
                                                       {kMul, 17, 7, 16, 0},
                                                       {kMul, 18, 8, 2, 0},
                                                       {kAdd, 17, 17, 18, 0},
                                                       {kMul, 16, 16, 16, 0},
                                                       {kMul, 16, 9, 16, 0},
                                                       {kMul, 18, 10, 3, 0},
                                                       {kAdd, 16, 16, 18, 0},
                                                       {kMul, 18, 17, 11, 0},
                                                       {kMul, 19, 16, 12, 0},
                                                       {kAdd, 19, 19, 13, 0},
                                                       {kSqrt, 19, 19, 0, 0},
                                                       {kAdd, 19, 19, 14, 0},
                                                       {kDiv, 18, 18, 19, 0},
                                                       {kMul, 18, 15, 18, 0},
                                                       {kAdd, 18, 1, 18, 0}}},
                                                     {18, 17, 16}};
inline constexpr KnownProgram<20, 3> kAdamwClipped = {
    "adamw, clipped",
    4,
    13,
    4,
    {{{kMul, 17, 0, 4, 0},   {kMul, 17, 17, 5, 0},  {kSelect, 17, 6, 0, 17}, {kMul, 18, 7, 17, 0},
      {kMul, 19, 8, 2, 0},   {kAdd, 18, 18, 19, 0}, {kMul, 17, 17, 17, 0},   {kMul, 17, 9, 17, 0},
      {kMul, 19, 10, 3, 0},  {kAdd, 17, 17, 19, 0}, {kMul, 19, 18, 11, 0},   {kMul, 20, 17, 12, 0},
      {kAdd, 20, 20, 13, 0}, {kSqrt, 20, 20, 0, 0}, {kAdd, 20, 20, 14, 0},   {kDiv, 19, 19, 20, 0},
      {kMul, 20, 15, 1, 0},  {kAdd, 19, 19, 20, 0}, {kMul, 19, 16, 19, 0},   {kAdd, 19, 1, 19, 0}}},
    {19, 18, 17}};
inline constexpr KnownProgram<3, 2> kLambClippedNorm = {
    "lamb, clipped, norm", 4, 1, 2, {{{kMul, 5, 0, 0, 0}, {kAdd, 5, 5, 4, 0}, {kMul, 6, 1, 1, 0}}}, {5, 6}};
inline constexpr KnownProgram<19, 1> kLambClippedSums = {"lamb, clipped, sums",
                                                         4,
                                                         12,
                                                         3,
                                                         {{{kMul, 16, 0, 4, 0},
                                                           {kMul, 16, 16, 5, 0},
                                                           {kSelect, 16, 6, 0, 16},
                                                           {kMul, 17, 7, 16, 0},
                                                           {kMul, 18, 8, 2, 0},
                                                           {kAdd, 17, 17, 18, 0},
                                                           {kMul, 16, 16, 16, 0},
                                                           {kMul, 16, 9, 16, 0},
                                                           {kMul, 18, 10, 3, 0},
                                                           {kAdd, 16, 16, 18, 0},
                                                           {kMul, 17, 17, 11, 0},
                                                           {kMul, 16, 16, 12, 0},
                                                           {kAdd, 16, 16, 13, 0},
                                                           {kSqrt, 16, 16, 0, 0},
                                                           {kAdd, 16, 16, 14, 0},
                                                           {kDiv, 16, 17, 16, 0},
                                                           {kMul, 17, 15, 1, 0},
                                                           {kAdd, 16, 16, 17, 0},
                                                           {kMul, 16, 16, 16, 0}}},
                                                         {16}};
inline constexpr KnownProgram<21, 3> kLambClipped = {
    "lamb, clipped",
    4,
    14,
    4,
    {{{kMul, 18, 0, 4, 0},   {kMul, 18, 18, 5, 0},  {kSelect, 18, 6, 0, 18}, {kMul, 19, 7, 18, 0},
      {kMul, 20, 8, 2, 0},   {kAdd, 19, 19, 20, 0}, {kMul, 18, 18, 18, 0},   {kMul, 18, 9, 18, 0},
      {kMul, 20, 10, 3, 0},  {kAdd, 18, 18, 20, 0}, {kMul, 20, 19, 11, 0},   {kMul, 21, 18, 12, 0},
      {kAdd, 21, 21, 13, 0}, {kSqrt, 21, 21, 0, 0}, {kAdd, 21, 21, 14, 0},   {kDiv, 20, 20, 21, 0},
      {kMul, 21, 15, 1, 0},  {kAdd, 20, 20, 21, 0}, {kMul, 20, 20, 16, 0},   {kMul, 20, 17, 20, 0},
      {kAdd, 20, 1, 20, 0}}},
    {20, 19, 18}};
// END

}  // namespace jaxhetero::known
