// fp16's loss scaling.
#include "llmc/train/loss_scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "llmc/core/error.h"

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
                scaler.restore(saved);
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

}  // namespace
}  // namespace llmc
