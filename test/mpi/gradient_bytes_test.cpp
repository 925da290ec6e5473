// A training step sends the bytes that its list says, in each dtype of gradients, and leaves all ranks with the same
// gradients.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "llmc/device/arenas.h"
#include "llmc/parallel/executor.h"
#include "llmc/plan/run_plan.h"
#include "mpi_test.h"

namespace llmc {
namespace {

using test::world;

constexpr GPTConfig config{.layers = 2, .heads = 2, .channels = 20, .sequence_length = 8, .vocabulary = 37};

struct Sent {
    std::uint64_t reduced, gathered;  // by this rank, in one step
    std::uint64_t of_list;            // what the list says of both
    std::uint64_t of_squares;         // gathered besides
};

Sent train_one_step(DType gradient_dtype) {
    const int ranks = world().size();
    const auto device = make_cpu_device(1);
    const RunPlan plan = plan_run({.config = config,
                                   .dtype = DType::bf16,
                                   .gradient_dtype = gradient_dtype,
                                   .mesh = {.sharding = {.shards = ranks}, .data_rank = world().rank()},
                                   .global_batch_tokens = 2 * ranks * config.sequence_length,
                                   .micro_batch_sequences = 1},
                                  device->ops(), 0);
    const Arenas arenas(*device, plan.memory);
    ParameterStore store(*device, arenas, plan.store, 0.1);
    device->ops().set_workspace(arenas[plan.workspace]);
    store.initialize(1);
    Executor executor(config, *device, world(), store, bind(plan.activations, arenas), 1, true);
    const auto load = [&](int micro_batch, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            inputs[i] = static_cast<std::int32_t>(
                (7 * i + static_cast<std::size_t>(5 * world().rank() + micro_batch)) % 37);
            targets[i] = static_cast<std::int32_t>((3 * i + static_cast<std::size_t>(micro_batch)) % 37);
        }
    };
    const std::uint64_t reduced = world().traffic(CallKind::reduce_scatter).bytes;
    const std::uint64_t gathered = world().traffic(CallKind::all_gather).bytes;
    executor.run(plan.training, {.load = load,
                                 .sequences = 1,
                                 .loss_scale = 1.0F / 64,
                                 .adamw = {1, 1e-3, 0.9, 0.95, 1e-8, 1.0},
                                 .rounding_seed = 3});
    Sent sent{.reduced = world().traffic(CallKind::reduce_scatter).bytes - reduced,
              .gathered = world().traffic(CallKind::all_gather).bytes - gathered,
              .of_list = 0,
              .of_squares = 0};

    std::vector<std::uint64_t> bytes;
    for (int unit = 0; unit < store.units(); ++unit) {
        const Tensor gradients = store.buffers(unit).gradients;
        EXPECT_EQ(gradients.dtype, gradient_dtype);
        bytes.push_back(gradients.bytes());
        const std::int64_t blocks = gradients.elements() / norm_block_elements / ranks;
        sent.of_squares += static_cast<std::uint64_t>(blocks * (ranks - 1)) * sizeof(float);
        // The same on all ranks, gradients and the parameters made of them.
        for (const Tensor& own : {gradients, store.buffers(unit).parameters}) {
            std::vector<std::byte> first(own.data, own.data + own.bytes());
            world().broadcast({first.data(), own.dtype, own.shape}, 0);
            EXPECT_EQ(std::memcmp(first.data(), own.data, own.bytes()), 0) << store.layout(unit).name();
        }
    }
    sent.of_list = gradient_bytes_sent(plan.training, bytes);
    return sent;
}

TEST(GradientBytes, AreThoseOfTheListAndHalfInBf16) {
    const Sent whole = train_one_step(DType::fp32), half = train_one_step(DType::bf16);
    for (const Sent& sent : {whole, half}) {
        EXPECT_EQ(2 * sent.reduced, sent.of_list);
        EXPECT_EQ(sent.reduced + sent.gathered, sent.of_list + sent.of_squares);
    }
    EXPECT_EQ(whole.reduced, 2 * half.reduced);
    EXPECT_EQ(half.reduced > 0, world().size() > 1);
}

}  // namespace
}  // namespace llmc
