// A whole model's loss, gradients and first optimizer steps equal PyTorch's, for a model of each family. The
// expected values come only from the files in test/reference, which test/make_references.py makes.
// test/python/model_bounds.py derives the bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "test/probe/run_model.h"
#include "test/unit/reference_model.h"

namespace llmc::probe {
namespace {

struct Case {
    std::string name;
    DType dtype;
    std::int64_t micro_batches;
};

class ReferenceModel : public testing::TestWithParam<Case> {
  protected:
    double number(const std::string& name) const { return numbers(name).at(0); }
    std::vector<double> numbers(const std::string& name) const {
        std::vector<double> values(static_cast<std::size_t>(expected_.entry(name).shape.elements()));
        expected_.read(name, std::span(values));
        return values;
    }
    std::string dtype() const { return std::string(name_of(GetParam().dtype)); }

    Model make_model() const {
        const auto& [name, dtype, micro_batches] = GetParam();
        const std::int64_t batch = expected_.entry("tokens").shape[0];
        return {reference_file(name, "weights"), reference_model(name), dtype, batch, batch / micro_batches};
    }

    SafetensorsReader expected_{reference_file(GetParam().name, "expected")};
};

TEST_P(ReferenceModel, LossAndEveryGradient) {
    Model model = make_model();
    const double loss = model.step(read_tokens(expected_), false);
    EXPECT_NEAR(loss, number("loss"), number("bound/" + dtype() + "/loss"));

    const auto path = std::filesystem::path(testing::TempDir()) / ("gradients_" + GetParam().name + dtype());
    model.save_gradients(path);
    const SafetensorsReader gradients(path);
    std::ptrdiff_t compared = 0;
    for (const SafetensorsEntry& entry : gradients.entries()) {
        std::vector<double> gradient(static_cast<std::size_t>(entry.shape.elements()));
        gradients.read(entry.name, std::span(gradient));
        const std::vector<double> reference = numbers("gradient/" + entry.name);
        ASSERT_EQ(entry.shape, expected_.entry("gradient/" + entry.name).shape);
        double squares = 0;
        for (std::size_t i = 0; i < gradient.size(); ++i) squares += std::pow(gradient[i] - reference[i], 2);
        EXPECT_LE(std::sqrt(squares), number("bound/" + dtype() + "/gradient/" + entry.name)) << entry.name;
        ++compared;
    }
    EXPECT_EQ(compared, std::ranges::count_if(expected_.entries(), [](const SafetensorsEntry& entry) {
                  return entry.name.starts_with("gradient/");
              }));
    std::filesystem::remove(path);
}

TEST_P(ReferenceModel, LossesOfSteps) {
    if (GetParam().dtype != DType::fp32) return;  // test_training_against_pytorch.py follows bf16
    Model model = make_model();
    const std::vector<double> losses = numbers("losses");
    const std::vector<std::int32_t> tokens = read_tokens(expected_);
    for (std::size_t step = 0; step < losses.size(); ++step) {
        const double loss = model.step(tokens, true,
                                       {.step = static_cast<std::int64_t>(step) + 1,
                                        .learning_rate = 1e-3F,
                                        .numbers = {0.9F, 0.999F, 1e-8F},
                                        .max_grad_norm = 0});
        EXPECT_NEAR(loss, losses[step], 1e-5) << "step " << step + 1;
    }
}

std::vector<Case> all_cases() {
    std::vector<Case> cases{{"odd", DType::fp32, 1},  {"odd", DType::fp32, 3},  {"odd", DType::bf16, 1},
                            {"wide", DType::fp32, 1}, {"wide", DType::fp32, 2}, {"wide", DType::bf16, 4}};
    for (const char* name : {"llama", "mistral", "qwen2", "qwen3", "olmo2", "nanochat"})
        for (const DType dtype : {DType::fp32, DType::bf16})
            for (const std::int64_t micro_batches : {1, 2}) cases.push_back({name, dtype, micro_batches});
    return cases;
}
INSTANTIATE_TEST_SUITE_P(AllModels, ReferenceModel, testing::ValuesIn(all_cases()), [](const auto& test) {
    return test.param.name + "_" + std::string(name_of(test.param.dtype)) + "_in_" +
           std::to_string(test.param.micro_batches);
});

}  // namespace
}  // namespace llmc::probe
