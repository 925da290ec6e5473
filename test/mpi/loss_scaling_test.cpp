// In fp16 and with products in 8 bits, an overflow in one tensor of one rank in one micro-batch: all ranks skip the
// step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mpi_test.h"
#include "test/cpu_device_with.h"
#include "trainer_run.h"

namespace llmc {
namespace {

using test::world;

// Makes an element infinite in the result of one product of the backward pass.
class Overflowing final : public cpu::CpuOps {
  public:
    using CpuOps::CpuOps;

    void run(const Op& op) override {
        CpuOps::run(op);
        const auto* const product = std::get_if<MatmulBackward>(&op);
        if (!product || !product->din) return;
        const Tensor& din = product->din;
        const std::uint16_t infinity = din.dtype == DType::fp16 ? 0x7c00 : 0x7f80;
        if (products == overflow_at) std::memcpy(din.data, &infinity, sizeof infinity);
        ++products;
    }

    // Counted from the start of a step; -1: none.
    int products = 0, overflow_at = -1;
};

// The state that a skipped step must not change.
std::vector<float> state(ParameterStore& store) {
    std::vector<float> values;
    for (int unit = 0; unit < store.units(); ++unit) {
        if (!store.has(unit)) continue;
        const UnitBuffers& buffers = store.buffers(unit);
        for (const Tensor& tensor : {buffers.master, buffers.state[0].values, buffers.state[1].values}) {
            const auto all = tensor.span<float>();
            values.insert(values.end(), all.begin(), all.end());
        }
    }
    return values;
}

class Overflow : public testing::TestWithParam<std::vector<const char*>> {};

TEST_P(Overflow, AnywhereIsSkippedEverywhere) {
    const bool in_pairs = std::ranges::any_of(
        GetParam(), [](std::string_view option) { return option.ends_with("parallel=2"); });
    if (in_pairs && world().size() % 2 != 0) GTEST_SKIP() << "needs an even number of ranks";
    std::vector<const char*> options = GetParam();
    const bool is_fp16 = options.front() == std::string_view("--dtype=fp16");
    const auto scale = [&](int skipped) {
        return is_fp16 ? std::optional(65536.0 / (1 << skipped)) : std::nullopt;
    };
    const std::string tokens = "--global-batch-tokens=" + std::to_string(8 * 2 * world().size());
    options.push_back(tokens.c_str());
    std::vector<double> losses;  // of the first run
    for (int rank = 0; rank < world().size(); ++rank) {
        auto device = std::make_unique<test::CpuDeviceWith<Overflowing>>();
        Overflowing& ops = device->ops();
        test::StoriesRun run(options, std::move(device));
        const StepMetrics first = run.step();
        EXPECT_TRUE(first.grad_norm);
        const int products = ops.products;
        run.trainer().finish_update();
        const std::vector<float> before = state(run.trainer().store());
        std::vector<double> found = {first.loss};
        // In the last layer of the first micro-batch, in between, and in the first layer of the last micro-batch.
        int skipped = 0;
        for (const int at : {0, products / 2, products - 1}) {
            ops.products = 0;
            ops.overflow_at = world().rank() == rank ? at : -1;
            const StepMetrics metrics = run.step();
            found.push_back(metrics.loss);
            EXPECT_FALSE(metrics.grad_norm) << "planted on rank " << rank << " in product " << at;
            EXPECT_EQ(metrics.skipped_steps, skipped + 1);
            EXPECT_EQ(metrics.loss_scale, scale(skipped));
            ++skipped;
        }
        EXPECT_TRUE(state(run.trainer().store()) == before);
        ops.overflow_at = -1;
        const StepMetrics last = run.step();
        found.push_back(last.loss);
        EXPECT_TRUE(last.grad_norm);
        EXPECT_EQ(last.skipped_steps, 3);
        EXPECT_EQ(last.loss_scale, scale(3));
        run.trainer().finish_update();
        EXPECT_FALSE(state(run.trainer().store()) == before);
        if (rank == 0) losses = found;
        EXPECT_EQ(found, losses) << "wherever the overflow is";
    }
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, Overflow,
    testing::Values(std::vector{"--dtype=fp16", "--zero-stage=0"},
                    std::vector{"--dtype=fp16", "--zero-stage=2"},
                    std::vector{"--dtype=fp16", "--zero-stage=3"},
                    std::vector{"--dtype=fp16", "--pipeline-parallel=2"},
                    std::vector{"--dtype=fp16", "--tensor-parallel=2"},
                    std::vector{"--dtype=bf16", "--fp8=delayed", "--zero-stage=3"},
                    std::vector{"--dtype=bf16", "--fp8=delayed", "--pipeline-parallel=2"},
                    std::vector{"--dtype=bf16", "--fp8=current", "--tensor-parallel=2"}));

}  // namespace
}  // namespace llmc
