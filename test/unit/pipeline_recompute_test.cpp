// Recompute in pipelines. The same blocks recompute for any number of stages, each does so once, and slots
// hold what is left.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/model/units.h"
#include "llmc/parallel/pipeline/pipeline_schedule.h"
#include "llmc/plan/run_plan.h"
#include "test/gpt2_units.h"
#include "test/unit/step_specs.h"

namespace llmc {
namespace {

using enum RecomputeKind;
using enum PipelineSchedule;

constexpr GPTConfig config{
    .layers = 8, .heads = 4, .channels = 64, .sequence_length = 256, .vocabulary = 256};

// Sizes of one sequence in fp32. Every tensor is a multiple of 256 bytes.
struct Sizes {
    explicit Sizes(const TensorSplit& split)
        : tensor(split.ranks), tokens(split.sequence_parallel ? split.ranks : 1) {}

    std::int64_t tensor, tokens;
    std::int64_t whole = 256 * 64 * 4;                     // the residual stream of all tokens
    std::int64_t stream = whole / tokens;                  // the tokens of one rank
    std::int64_t row = 256 * 4 / tokens;                   // one number per token
    std::int64_t heads = config.heads * 256 * 4 / tensor;  // one number per token and head
    // Activations of a block without its input, with its output.
    std::int64_t kept = 4 * stream + 12 * whole / tensor + 4 * row + heads;
    std::int64_t light = 2 * stream + 4 * whole / tensor;  // the bytes that selective recompute does not keep
    std::int64_t output_gradients = 4 * stream + 7 * whole / tensor;
};

class PipelinesThatRecompute : public testing::Test {
  protected:
    // The plans of all stages, which have equally many layers.
    std::vector<RunPlan> plans(PipelineSchedule schedule, int stages, int virtual_stages, int micro_batches,
                               const Recompute& recompute, std::int64_t layers = config.layers) {
        const int chunks = stages * virtual_stages;
        std::string each;
        for (int chunk = 0; chunk < chunks; ++chunk)
            each += fmt::format("{}{}", chunk > 0 ? "," : "", layers / chunks);
        RunSpec spec{
            .model = gpt2(config),
            .mesh = {.pipeline = stages, .tensor = split.ranks, .sequence_parallel = split.sequence_parallel},
            .pipeline_schedule = schedule,
            .virtual_stages = virtual_stages,
            .pipeline_layers = each,
            .recompute = recompute,
            .global_batch_tokens = micro_batches * config.sequence_length,
            .micro_batch_sequences = 1};
        GPTConfig other = config;
        other.layers = layers;
        spec.model = gpt2(other);
        std::vector<RunPlan> all;
        for (int stage = 0; stage < stages; ++stage) {
            spec.mesh.rank = spec.mesh.rank_of(stage, 0, 0);
            all.push_back(plan_run(spec, device_->sizes(), 0));
        }
        return all;
    }

    // For one rank, and for ranks that share each layer.
    void for_all_splits(const std::function<void(const Sizes&)>& f) {
        for (const TensorSplit& of : {TensorSplit{}, {2, false}, {2, true}, {4, false}, {4, true}}) {
            SCOPED_TRACE(fmt::format("{} tensor ranks, tokens divided: {}", of.ranks, of.sequence_parallel));
            split = of;
            f(Sizes(of));
        }
    }

    TensorSplit split{};

  private:
    std::unique_ptr<Device> device_ = make_cpu_device(1);
};

std::int64_t activations_of(const RunPlan& plan) {
    return static_cast<std::int64_t>(plan.memory.bytes(ArenaKind::activations));
}

// In buffers whose names begin with `begin`.
std::int64_t bytes_named(const RunPlan& plan, std::string_view begin) {
    std::int64_t sum = 0;
    for (const MemoryLayout::Buffer& buffer : plan.memory.buffers()) {
        if (buffer.name.starts_with(begin))
            sum += buffer.shape.elements() * static_cast<std::int64_t>(size_of(buffer.dtype));
    }
    return sum;
}

// How often the list has an action of this kind for a block.
std::int64_t times(const RunPlan& plan, ActionKind kind, int block) {
    return std::ranges::count_if(plan.training.actions, [&](const Action& action) {
        return action.kind == kind && action.part == block_part(block);
    });
}

// The last of every four blocks of the model recomputes. Stages have two blocks each, so no stage has a
// fourth block of its own.
TEST_F(PipelinesThatRecompute, BlocksByTheirNumberInTheModel) {
    for_all_splits([&](const Sizes& sizes) {
        constexpr int m = 4;
        for (const RecomputeKind kind : {selective, block}) {
            const std::vector<RunPlan> with = plans(gpipe, 4, 1, m, {.kind = kind, .every = 4}),
                                       without = plans(gpipe, 4, 1, m, {});
            const std::int64_t shared = kind == selective ? sizes.light : sizes.kept - sizes.stream;
            for (int stage = 0; stage < 4; ++stage) {
                SCOPED_TRACE(fmt::format("{}, stage {}", name_of(kind), stage));
                const RunPlan& plan = with[static_cast<std::size_t>(stage)];
                const bool recomputes = stage == 1 || stage == 3;
                for (int number = 2 * stage; number < 2 * stage + 2; ++number) {
                    // The last forward pass and the first backward pass belong to different micro-batches.
                    EXPECT_EQ(times(plan, ActionKind::recompute, number), number % 4 == 3 ? m : 0);
                }
                EXPECT_EQ(activations_of(without[static_cast<std::size_t>(stage)]) - activations_of(plan),
                          recomputes ? (m - 1) * shared : 0);
                EXPECT_EQ(to_string(plan.training).find("recompute ") != std::string::npos, recomputes);
            }
        }
    });
}

// Each chunk has one block, and every second block recomputes. With an even number of stages, all or none of
// a stage's blocks recompute. With an odd number, some blocks of each stage do, in slots of their own.
TEST_F(PipelinesThatRecompute, ChunksThatKeepDifferentBlocks) {
    for_all_splits([&](const Sizes& sizes) {
        const Recompute second{.kind = block, .every = 2};
        for (const auto& [stages, layers] : {std::pair{2, 4}, {3, 6}}) {
            for (const RunPlan& plan : plans(interleaved, stages, 2, 2 * stages, second, layers)) {
                SCOPED_TRACE(fmt::format("{} stages, stage {}", stages, plan.spec.mesh.stage()));
                std::int64_t expected = 0;
                for (int slot = 0; slot < std::ssize(plan.activations.slots); ++slot) {
                    std::vector<int> of_slot;
                    for (const Action& action : plan.training.actions) {
                        if (action.slot == slot && layer_of(plan.part(), action.part) >= 0 &&
                            action.micro_batch >= 0 && action.stream == StreamKind::compute)
                            of_slot.push_back(layer_of(plan.part(), action.part) % 2);
                    }
                    ASSERT_FALSE(of_slot.empty());
                    EXPECT_EQ(std::ranges::count(of_slot, of_slot.front()), std::ssize(of_slot));
                    expected += of_slot.front() == 1 ? sizes.stream : sizes.kept;
                }
                EXPECT_EQ(bytes_named(plan, "slot "), expected);
                const bool any = stages == 3 || plan.spec.mesh.stage() == 1;
                EXPECT_EQ(bytes_named(plan, "recomputed."), any ? sizes.kept - sizes.stream : 0);
                for (const Chunk& chunk : plan.part().chunks) {
                    // The last block's backward pass directly follows its forward pass.
                    EXPECT_EQ(times(plan, ActionKind::recompute, chunk.first_layer) > 0,
                              chunk.first_layer % 2 == 1 && !chunk.makes_losses);
                }
            }
        }
    });
}

// ZB-H1: stage s holds the gradients of outputs of s + 1 micro-batches, for blocks that do not recompute.
TEST_F(PipelinesThatRecompute, OutputGradientsAreThoseBetweenTheTwoParts) {
    for_all_splits([&](const Sizes& sizes) {
        for (const int m : {1, 3, 8, 20}) {
            for (const Recompute recompute :
                 {Recompute{}, Recompute{.kind = block, .every = 2}, {.kind = selective}}) {
                for (const RunPlan& plan : plans(zb_h1, 8, 1, m, recompute, 16)) {
                    const int stage = plan.spec.mesh.stage();
                    SCOPED_TRACE(fmt::format("{} micro-batches, stage {}", m, stage));
                    int open = 0, most = 0;
                    const std::vector<std::vector<Pass>> passes = pipeline_passes(plan.pipeline);
                    for (const Pass& pass : passes[static_cast<std::size_t>(stage)]) {
                        if (pass.kind == PassKind::backward_input) most = std::max(most, ++open);
                        if (pass.kind == PassKind::backward_weight) --open;
                    }
                    EXPECT_EQ(most, std::min(m, stage + 1));
                    const int blocks = recompute.kind == none ? 2 : recompute.kind == block ? 1 : 0;
                    EXPECT_EQ(plan.activations.output_gradients.size(), most * blocks);
                    EXPECT_EQ(bytes_named(plan, "output gradients "), most * blocks * sizes.output_gradients);
                }
            }
        }
    });
}

// ZB-H1 when all blocks of a stage recompute: nothing is held for a second part, and the schedule is 1F1B.
TEST_F(PipelinesThatRecompute, NothingIsHeldForPartsThatAreEmpty) {
    for (const int m : {1, 3, 8, 20}) {
        for (const Recompute recompute :
             {Recompute{.kind = selective}, {.kind = block}, {.kind = block, .every = 2}}) {
            const std::vector<RunPlan> zero_bubble = plans(zb_h1, 8, 1, m, recompute, 8),
                                       one_f_one_b_plans = plans(one_f_one_b, 8, 1, m, recompute, 8);
            for (std::size_t stage = 0; stage < one_f_one_b_plans.size(); ++stage) {
                SCOPED_TRACE(fmt::format("{} every {}, {} micro-batches, stage {}", name_of(recompute.kind),
                                         recompute.every, m, stage));
                const RunPlan& plan = zero_bubble[stage];
                const bool is_same = recompute.recomputes(static_cast<std::int64_t>(stage));
                const int held = std::min(m, is_same ? 8 - static_cast<int>(stage) : 8);
                EXPECT_EQ(std::ssize(plan.activations.slots), held);
                if (!is_same) continue;
                for (const ArenaKind arena : all_arenas)
                    EXPECT_EQ(plan.memory.bytes(arena), one_f_one_b_plans[stage].memory.bytes(arena));
                EXPECT_EQ(plan.training.actions.size(), one_f_one_b_plans[stage].training.actions.size());
            }
        }
    }
}

}  // namespace
}  // namespace llmc
