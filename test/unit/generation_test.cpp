// Generation by rows, with kept keys and values, against the full forward pass over the same text.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "test/probe/run_model.h"
#include "test/unit/reference_model.h"

namespace llmc {
namespace {

// The odd reference model, which has biases, and weights far from their initial values.
probe::Model make_model(DType dtype) {
    return {reference_file("odd", "weights"),
            reference_model("odd"),
            dtype,
            1,
            1,
            0,
            DType::fp32,
            make_cpu_device(1)};
}

std::vector<std::int32_t> text_of(const probe::Model& model) {
    std::vector<std::int32_t> text;
    for (std::int32_t t = 0; t < model.model().sequence_length; ++t)
        text.push_back(static_cast<std::int32_t>((7 * t * t + 3) % model.model().vocabulary));
    return text;
}

// Cross-entropies of some targets at each position.
using Losses = std::vector<double>;

template <class LossAt>
Losses losses_of(const probe::Model& model, LossAt&& loss_at) {
    Losses losses;
    for (std::size_t t = 0; t < static_cast<std::size_t>(model.model().sequence_length); ++t) {
        for (std::int32_t target = 0; target < model.model().vocabulary; target += 5)
            losses.push_back(loss_at(t, target));
    }
    return losses;
}

Losses full_losses(DType dtype) {
    probe::Model model = make_model(dtype);
    const std::vector<std::int32_t> text = text_of(model);
    return losses_of(model,
                     [&](std::size_t t, std::int32_t target) { return model.loss_at(text, t, target); });
}

double cross_entropy(const std::vector<double>& logits, std::int32_t target) {
    double sum = 0;
    for (const double x : logits) sum += std::exp(x);
    return std::log(sum) - logits[static_cast<std::size_t>(target)];
}

// At each of the first `prompt` positions, computes all rows up to it at once. After these, computes one row
// at a time. With `prompt` 0, computes all rows at once at every position.
Losses losses_by_rows(DType dtype, std::int64_t prompt) {
    probe::Model model = make_model(dtype);
    const std::vector<std::int32_t> text = text_of(model);
    std::vector<std::vector<double>> logits;
    for (std::int64_t t = 0; t < model.model().sequence_length; ++t) {
        const bool at_once = prompt == 0 || t < prompt;
        logits.push_back(model.next_rows(text, {.position = at_once ? 0 : t, .count = at_once ? t + 1 : 1}));
    }
    return losses_of(model,
                     [&](std::size_t t, std::int32_t target) { return cross_entropy(logits[t], target); });
}

double root_mean_square_difference(const Losses& a, const Losses& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(a[i] - b[i], 2);
    return std::sqrt(sum / static_cast<double>(a.size()));
}

void expect_near(const Losses& losses, const Losses& expected, double bound) {
    ASSERT_EQ(losses.size(), expected.size());
    for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], bound) << i;
}

// Each is within 1e-5 of the exact one, as the project promises for losses.
TEST(Generation, IsTheFullForwardPassInFp32) {
    const Losses full = full_losses(DType::fp32);
    for (const std::int64_t prompt : {0, 1, 5}) expect_near(losses_by_rows(DType::fp32, prompt), full, 2e-5);
}

// Each loss has errors from rounding activations to bf16. Comparing with fp32 shows their root mean square,
// because the weights are bf16 numbers. If both ways had independent errors, their difference would have
// twice the variance. The bound is 5.6 standard deviations, as in model_bounds.py.
TEST(Generation, IsTheFullForwardPassInBf16) {
    const Losses full = full_losses(DType::bf16);
    const double deviation = root_mean_square_difference(full, full_losses(DType::fp32));
    ASSERT_GT(deviation, 1e-4);
    for (const std::int64_t prompt : {0, 1, 5})
        expect_near(losses_by_rows(DType::bf16, prompt), full, 5.6 * std::sqrt(2) * deviation);
}

// An earlier text leaves no trace.
TEST(Generation, BeginsAnew) {
    probe::Model used = make_model(DType::fp32), fresh = make_model(DType::fp32);
    const std::vector<std::int32_t> text = text_of(used);
    const std::vector<std::int32_t> other(text.rbegin(), text.rend());
    for (std::int64_t t = 0; t < used.model().sequence_length; ++t) used.next_rows(other, {.position = t});
    for (const RowRange& rows : {RowRange{0, 3}, RowRange{3, 1}, RowRange{4, 2}})
        EXPECT_EQ(used.next_rows(text, rows), fresh.next_rows(text, rows));
}

}  // namespace
}  // namespace llmc
