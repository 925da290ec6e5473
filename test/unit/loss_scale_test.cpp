// fp16's loss scaling.
#include "llmc/train/loss_scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "test/cpu_device_with.h"
#include "test/gpt2_config.h"
#include "test/probe/run_model.h"

namespace llmc {
namespace {

Options fp16() {
    Options options;
    options.dtype = "fp16";
    options.global_batch_tokens = 3000;
    return options;
}

TEST(LossScale, BeginsWithTheTokensOfALargeStep) {
    Options options = fp16();
    EXPECT_EQ(LossScaler(options).scale(), 65536);
    options.global_batch_tokens = 3'000'000;
    EXPECT_EQ(LossScaler(options).scale(), 1 << 22);
    options.initial_loss_scale = 8;
    EXPECT_EQ(LossScaler(options).scale(), 8);
    options.dtype = "bf16";
    EXPECT_EQ(LossScaler(options).scale(), 1);
    EXPECT_FALSE(LossScaler(options).state());
}

// The rules of PyTorch's GradScaler, with DeepSpeed's hysteresis that a doubling refills.
struct Model {
    double scale;
    int window, hysteresis, good = 0, left = hysteresis;
    void step(bool overflows) {
        good = overflows ? 0 : good + 1;
        if (overflows && left > 1) {
            --left;
        } else if (overflows) {
            scale /= 2;
        } else if (good == window) {
            good = 0;
            left = hysteresis;
            scale = std::min(2 * scale, 0x1p60);
        }
    }
};

TEST(LossScale, FollowsItsModelThroughSavesAndResumes) {
    for (const int hysteresis : {1, 3}) {
        Options options = fp16();
        options.loss_scale_window = 5;
        options.loss_scale_hysteresis = hysteresis;
        options.initial_loss_scale = std::int64_t{1} << 40;
        LossScaler scaler(options);
        Model model{0x1p40, 5, hysteresis};
        std::mt19937 random(7);
        for (int step = 1; step <= 2000; ++step) {
            const bool overflows = random() % 7 == 0 && model.scale > 1;
            overflows ? scaler.see_overflow(step) : scaler.see_good_step();
            model.step(overflows);
            ASSERT_EQ(scaler.scale(), model.scale) << step;
            const auto saved = scaler.state();
            if (step % 100 == 0) {
                scaler = LossScaler(options);
                scaler.restore(saved, scaler.skipped_in_a_row());
            }
        }
    }
}

TEST(LossScale, StopsWhereItCannotShrink) {
    Options options = fp16();
    options.initial_loss_scale = 2;
    LossScaler scaler(options);
    scaler.see_overflow(1);
    EXPECT_EQ(scaler.scale(), 1);
    EXPECT_THROW(scaler.see_overflow(2), UserError);

    options.initial_loss_scale.reset();
    options.loss_scale = 1024;
    LossScaler fixed(options);
    for (int step = 1; step <= 9; ++step) fixed.see_overflow(step);
    fixed.see_good_step();
    for (int step = 1; step <= 9; ++step) fixed.see_overflow(step);
    EXPECT_THROW(fixed.see_overflow(10), UserError);
    EXPECT_EQ(fixed.scale(), 1024);
    EXPECT_FALSE(fixed.state());
}

TEST(LossScale, CountsSkippedStepsAcrossAResume) {
    Options fixed = fp16(), in_8_bits;
    fixed.loss_scale = 1024;
    in_8_bits.dtype = "bf16";
    in_8_bits.fp8 = "delayed";
    in_8_bits.global_batch_tokens = 3000;
    for (const Options& options : {fixed, in_8_bits}) {
        LossScaler before(options), after(options);
        for (int step = 1; step <= 6; ++step) before.see_overflow(step);
        EXPECT_EQ(before.skipped_in_a_row(), 6);
        after.restore(before.state(), before.skipped_in_a_row());
        for (int step = 7; step <= 9; ++step) after.see_overflow(step);
        EXPECT_THROW(after.see_overflow(10), UserError);
        after.see_good_step();
        EXPECT_EQ(after.skipped_in_a_row(), 0);
    }
}

// ---- a step of a whole model

// Counts the numbers of gradients in fp16 that are subnormal, which would round differently at another scale.
class SubnormalCounting final : public cpu::CpuOps {
  public:
    using CpuOps::CpuOps;

    void run(const Op& op) override {
        CpuOps::run(op);
        if (const auto* const classifier = std::get_if<FusedClassifier>(&op)) count(classifier->logits);
        if (const auto* const product = std::get_if<MatmulBackward>(&op)) count(product->din);
        if (const auto* const norm = std::get_if<LayerNormBackward>(&op)) count(norm->din);
        // Its results are what the next product reads.
        if (const auto* const attention = std::get_if<AttentionBackward>(&op))
            for (const Heads& heads : {attention->dq, attention->dk, attention->dv}) count(heads.rows);
    }

    int subnormal = 0, normal = 0;

  private:
    void count(const Tensor& tensor) {
        if (tensor.data == nullptr) return;
        for (const float16 x : tensor.span<float16>()) {
            const int magnitude = x.bits & 0x7fff;
            subnormal += magnitude > 0 && magnitude < 0x400 ? 1 : 0;
            normal += magnitude >= 0x400 ? 1 : 0;
        }
    }
};

TEST(LossScale, DoesNotChangeAStepWithoutSubnormalNumbers) {
    const GPTConfig config{.layers = 1, .heads = 1, .channels = 8, .sequence_length = 4, .vocabulary = 8};
    const std::vector<std::int32_t> tokens = {3, 1, 4, 1, 5};
    const auto stepped = [&](double scale, std::uint64_t seed) {
        auto device = std::make_unique<test::CpuDeviceWith<SubnormalCounting>>();
        const SubnormalCounting& ops = device->ops();
        probe::Model model(gpt2(config), DType::fp16, 1, 1, 0.1, DType::fp32, std::move(device));
        model.store().initialize(seed);
        model.step(tokens, true, {1, 1e-2, {0.9, 0.95, 1e-8}, 0.5, scale});
        std::vector<float> state = {static_cast<float>(model.norm_squared() / (scale * scale))};
        for (int unit = 0; unit < model.store().units(); ++unit) {
            const UnitBuffers& buffers = model.store().buffers(unit);
            for (const Tensor& tensor : {buffers.master, buffers.state[0].values, buffers.state[1].values}) {
                const auto all = tensor.span<float>();
                state.insert(state.end(), all.begin(), all.end());
            }
        }
        EXPECT_GT(ops.normal, 200);
        return std::pair(state, ops.subnormal);
    };
    const std::uint64_t seed = 6;  // one of those without subnormal numbers
    const auto small = stepped(1 << 12, seed), large = stepped(1 << 16, seed);
    ASSERT_EQ(small.second, 0);
    ASSERT_EQ(large.second, 0);
    EXPECT_TRUE(small.first == large.first);
    const auto without = stepped(1, seed);
    EXPECT_GT(without.second, 0);
    EXPECT_FALSE(without.first == large.first);
}

}  // namespace
}  // namespace llmc
