// The published numbers of parameters of models with names.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "llmc/model/family.h"

namespace llmc {
namespace {

struct Published {
    const char* name;
    std::int64_t parameters;
};
// The sources are the models' pages and papers; gpt2's counts leave the causal masks of its files out.
constexpr Published published[] = {
    {"gpt2", 124'439'808},          {"gpt2-xl", 1'557'611'200},     {"llama2-7b", 6'738'415'616},
    {"llama3-8b", 8'030'261'248},   {"llama3-70b", 70'553'706'496}, {"llama3-405b", 405'853'388'800},
    {"llama3.2-1b", 1'235'814'400}, {"llama3.2-3b", 3'212'749'824}, {"mistral-7b", 7'241'732'096},
    {"qwen2.5-0.5b", 494'032'768},  {"qwen3-0.6b", 596'049'920},    {"olmo2-7b", 7'298'617'344}};

class PublishedModels : public testing::TestWithParam<Published> {};

TEST_P(PublishedModels, HaveTheirNumberOfParameters) {
    const auto [name, parameters] = GetParam();
    EXPECT_EQ(count_parameters(make_model(family_of(name), choices_of(name))), parameters) << name;
}
INSTANTIATE_TEST_SUITE_P(All, PublishedModels, testing::ValuesIn(published));

// 6 for each weight of a product, and attention's scores and sums of the keys that a token sees.
TEST(PublishedModels, FlopsPerToken) {
    const Model model = make_model(family_of("llama3-8b"), choices_of("llama3-8b"));
    const double products =
        8'030'261'248.0 - 128'256.0 * 4096 /* embedding */ - (2 * 32 + 1) * 4096.0 /* norms */;
    const double attention = 12.0 * 32 * 32 * 128 * (2048 / 2.0);
    EXPECT_NEAR(training_flops_per_token(model) / (6 * products + attention), 1, 1e-12);
}

}  // namespace
}  // namespace llmc
