// The plan of a pipeline against the formulas of the schedules' authors: memory by stage and arena, also on
// tensor-parallel ranks, and bytes between stages.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/model/units.h"
#include "llmc/plan/run_plan.h"
#include "test/gpt2_units.h"

namespace llmc {
namespace {

// GPT-2 124M: every tensor is a multiple of 256 bytes.
constexpr GPTConfig gpt2_124m{
    .layers = 12, .heads = 12, .channels = 768, .sequence_length = 1024, .vocabulary = 50257};
constexpr std::int64_t B = 2, T = gpt2_124m.sequence_length, C = gpt2_124m.channels, NH = gpt2_124m.heads;
constexpr std::int64_t element = 2;  // bytes of bf16
constexpr std::int64_t activation = B * T * C * element, row = B * T * 4;
// One rank has each layer whole, or ranks share it. With sequence parallelism they also share the tokens
// between products.
constexpr std::array<TensorSplit, 5> splits{{{1, false}, {2, false}, {2, true}, {4, false}, {4, true}}};

class PipelinePlans : public testing::Test {
  protected:
    RunPlan plan(RunSpec spec, int stage) {
        spec.mesh.rank = spec.mesh.rank_of(stage, 0, 0);
        return plan_run(spec, device_->sizes(), 0);
    }

    // Calls f with the plans of all stages, for various meshes and schedules.
    void for_all(const std::function<void(const std::vector<RunPlan>&)>& f, const Recompute& recompute = {}) {
        for (const PipelineSchedule schedule : all_pipeline_schedules) {
            const bool is_interleaved = schedule == PipelineSchedule::interleaved;
            const bool has_chunks = is_interleaved || schedule == PipelineSchedule::breadth_first;
            for (const int stages : {2, 3, 4}) {
                for (const int micro_batches : {1, 2, 3, 12}) {
                    if (is_interleaved && micro_batches % stages != 0) continue;
                    SCOPED_TRACE(fmt::format("{}, {} stages, {} micro-batches", name_of(schedule), stages,
                                             micro_batches));
                    const RunSpec spec{.model = gpt2(gpt2_124m),
                                       .dtype = DType::bf16,
                                       .mesh = {.pipeline = stages,
                                                .tensor = split.ranks,
                                                .sequence_parallel = split.sequence_parallel,
                                                .sharding = sharding},
                                       .pipeline_schedule = schedule,
                                       .virtual_stages = has_chunks ? 2 : 1,
                                       .recompute = recompute,
                                       .global_batch_tokens = micro_batches * sharding.ranks() * B * T,
                                       .micro_batch_sequences = B};
                    std::vector<RunPlan> plans;
                    for (int stage = 0; stage < stages; ++stage) plans.push_back(plan(spec, stage));
                    f(plans);
                }
            }
        }
    }

    // The same for each tensor split.
    void for_all_splits(const std::function<void(const std::vector<RunPlan>&)>& f,
                        const Recompute& recompute = {}) {
        for (const TensorSplit& of : splits) {
            SCOPED_TRACE(fmt::format("{} tensor ranks, tokens divided: {}", of.ranks, of.sequence_parallel));
            split = of;
            for_all(f, recompute);
        }
    }

    Sharding sharding{};
    TensorSplit split{};

  private:
    std::unique_ptr<Device> device_ = make_cpu_device(1);
};

// By the formulas: the number of passes of chunks whose activations a stage holds (its slots).
int slots_of(const PipelineSpec& spec, int stage) {
    const int p = spec.stages, v = spec.virtual_stages, m = spec.micro_batches;
    switch (spec.schedule) {
        case PipelineSchedule::naive:
            return 1;
        case PipelineSchedule::gpipe:
            return m;
        case PipelineSchedule::breadth_first:
            return m * v;
        case PipelineSchedule::one_f_one_b:
            return std::min(m, p - stage);
        case PipelineSchedule::interleaved:
            return std::min(m * v, (v + 1) * p - 2 * stage - 1);
        case PipelineSchedule::zb_h1:
            return std::min(m, p);
    }
    return -1;
}

// Whether a chunk's input is received while all slots are in use. This happens if another forward pass
// follows the backward pass that frees a slot. With one slot, it also happens in an evaluation, in which
// forward passes follow one another.
bool receives_while_slots_are_full(const PipelineSpec& spec, int stage, int slots) {
    const bool receives = stage > 0 || spec.virtual_stages > 1;
    return receives && (slots < spec.micro_batches * spec.virtual_stages || slots == 1);
}

// Micro-batches between the embedding's forward and backward passes: their tokens are kept.
int tokens_of(const PipelineSpec& spec, int stage) {
    if (stage > 0) return 1;
    int now = 0, most = 1;
    const std::vector<std::vector<Pass>> passes = pipeline_passes(spec);
    for (const Pass& pass : passes.front()) {
        if (pass.chunk != 0) continue;
        now += pass.kind == PassKind::forward ? 1 : -1;
        most = std::max(most, now);
    }
    return most;
}

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

std::int64_t bytes(const RunPlan& plan, ArenaKind arena) {
    return static_cast<std::int64_t>(plan.memory.bytes(arena));
}

// Sizes of the buffers that tensor-parallel ranks share, and of the values between products, where ranks
// share only the tokens.
struct Sizes {
    explicit Sizes(const TensorSplit& split)
        : tensor(split.ranks),
          tokens(split.sequence_parallel ? split.ranks : 1),
          vocabulary(round_up(gpt2_124m.vocabulary, 128 * tensor) / tensor) {}

    std::int64_t tensor, tokens;
    std::int64_t vocabulary;  // columns of the logits
    std::int64_t stream = activation / tokens, own_row = row / tokens;

    // Activations of a block, without its input: two layernorms (C), Q, K and V (3C), attention, the sum
    // after it, the MLP before and after GELU (4C each), and the output. Also means and reciprocal
    // deviations, and the log-sum-exp of each head.
    std::int64_t kept = 4 * stream + 12 * activation / tensor + 4 * own_row + NH / tensor * row;
    // Selective recompute does not keep the layernorms and GELU.
    std::int64_t recomputed = 2 * stream + 4 * activation / tensor;
    // Zero-bubble schedules keep the gradients of outputs from the first part of a block's backward pass to
    // the second. These are the gradients of the layernorms, both projections, Q, K and V, and the MLP.
    std::int64_t kept_for_weights = 4 * stream + (3 + 4) * activation / tensor;
    // Scratch of the block that runs: a product's addend or input, Q, K and V, the MLP. Also the tokens that
    // a rank gathers from others.
    std::int64_t gathered = tokens > 1 ? activation : 0;
    std::int64_t scratch = activation + (3 + 4) * activation / tensor + gathered;

    // Layernorm's output, its statistics and its gradient, the losses, and some rows of logits. When ranks
    // have some of the columns, they exchange a maximum, a sum and the target's logit for each row.
    // Generation needs a whole row too.
    std::int64_t head(std::int64_t logits_bytes) const {
        const std::int64_t rows =
            std::clamp<std::int64_t>(logits_bytes / (vocabulary * element) / 128 * 128, 1, B * T);
        const std::int64_t told =
            tensor > 1 ? round_up(tensor * rows * 3 * 4, 256) + tensor * vocabulary * element : 0;
        return stream + 2 * own_row + activation + row + rows * vocabulary * element + told + gathered;
    }
};

std::int64_t activations_of(const RunPlan& plan, int stage, std::int64_t of_block) {
    const Sizes sizes(plan.spec.mesh.split());
    PipelineSpec spec = plan.pipeline;
    // All blocks recompute, or none.
    if (spec.splits_backward() && plan.part().recomputes_any(plan.spec.recompute))
        spec.schedule = PipelineSchedule::one_f_one_b;
    const int slots = slots_of(spec, stage);
    const std::int64_t blocks = plan.part().most_places_of_a_chunk();
    std::int64_t sum = slots * (blocks * of_block + sizes.stream);  // and each chunk's input
    sum += (tokens_of(spec, stage) + 1) * 2 * row;                  // and the tokens of the next micro-batch
    // Gradients of micro-batches between the two parts of their backward passes.
    if (spec.splits_backward())
        sum += std::min(spec.micro_batches, stage + 1) * blocks * sizes.kept_for_weights;
    sum += sizes.scratch;
    sum += sizes.stream;  // the gradient that is used in computation
    if (plan.part().makes_losses()) sum += sizes.head(static_cast<std::int64_t>(plan.spec.logits_bytes));
    std::int64_t norm_blocks = 0;
    for (const UnitLayout& unit : plan.store.units)
        norm_blocks += unit.padded_elements(plan.spec.mesh.data_ranks()) / norm_block_elements;
    return sum + 256 + round_up(4 * norm_blocks, 256);
}

TEST_F(PipelinePlans, ActivationsAreThoseInFlight) {
    for_all_splits([&](const std::vector<RunPlan>& plans) {
        for (int stage = 0; stage < std::ssize(plans); ++stage) {
            const RunPlan& plan = plans[static_cast<std::size_t>(stage)];
            EXPECT_EQ(plan.activations.slots.size(), slots_of(plan.pipeline, stage)) << "stage " << stage;
            EXPECT_EQ(bytes(plan, ArenaKind::activations), activations_of(plan, stage, Sizes(split).kept))
                << "stage " << stage;
        }
    });
}

// 1F1B holds at most as many micro-batches as there are stages, and GPipe holds all. The first stage holds
// most.
TEST_F(PipelinePlans, OneForwardOneBackwardHoldsNoMoreForMoreMicroBatches) {
    const auto activations = [&](PipelineSchedule schedule, int micro_batches, int stage) {
        return bytes(plan({.model = gpt2(gpt2_124m),
                           .dtype = DType::bf16,
                           .mesh = {.pipeline = 4},
                           .pipeline_schedule = schedule,
                           .pipeline_layers = "3,3,3,3",
                           .global_batch_tokens = micro_batches * B * T,
                           .micro_batch_sequences = B},
                          stage),
                     ArenaKind::activations);
    };
    using enum PipelineSchedule;
    const std::int64_t slot = 3 * Sizes({}).kept + activation;
    EXPECT_EQ(activations(one_f_one_b, 4, 0), activations(one_f_one_b, 64, 0));
    EXPECT_EQ(activations(one_f_one_b, 4, 0), activations(gpipe, 4, 0));
    // This includes the tokens of each.
    EXPECT_EQ(activations(gpipe, 64, 0) - activations(one_f_one_b, 64, 0), 60 * (slot + 2 * row));
    EXPECT_EQ(activations(one_f_one_b, 64, 1) - activations(one_f_one_b, 64, 2), slot);
    EXPECT_EQ(activations(gpipe, 64, 1), activations(gpipe, 64, 2));
}

TEST_F(PipelinePlans, RecomputeKeepsLessOfEachInFlight) {
    // Buffers that blocks recompute exist once.
    const auto expect = [&](RecomputeKind kind, const std::function<std::int64_t(const Sizes&)>& lost) {
        for_all_splits(
            [&](const std::vector<RunPlan>& plans) {
                const Sizes sizes(split);
                for (int stage = 0; stage < std::ssize(plans); ++stage) {
                    const RunPlan& plan = plans[static_cast<std::size_t>(stage)];
                    EXPECT_EQ(bytes(plan, ArenaKind::activations),
                              activations_of(plan, stage, sizes.kept - lost(sizes)) + lost(sizes))
                        << "stage " << stage;
                }
            },
            {.kind = kind});
    };
    expect(RecomputeKind::selective, [](const Sizes& sizes) { return sizes.recomputed; });
    expect(RecomputeKind::block, [](const Sizes& sizes) { return sizes.kept - sizes.stream; });
}

// This arena holds one input that is received ahead, and two gradients: one is received and one is sent. A
// third gradient, which is in use, is elsewhere. Breadth-first, the gradients of all micro-batches wait for the next
// chunk.
TEST_F(PipelinePlans, TheirOwnArenaHoldsWhatIsReceivedAndSent) {
    for_all_splits([&](const std::vector<RunPlan>& plans) {
        for (int stage = 0; stage < std::ssize(plans); ++stage) {
            const RunPlan& plan = plans[static_cast<std::size_t>(stage)];
            const PipelineSpec& spec = plan.pipeline;
            const bool beside = receives_while_slots_are_full(spec, stage, slots_of(spec, stage));
            const int waiting = spec.schedule == PipelineSchedule::breadth_first ? spec.micro_batches + 1 : 2;
            const std::int64_t gradients = std::min(waiting, spec.micro_batches * spec.virtual_stages - 1);
            EXPECT_EQ(bytes(plan, ArenaKind::pipeline), (gradients + (beside ? 1 : 0)) * Sizes(split).stream)
                << "stage " << stage;
        }
    });
    EXPECT_EQ(bytes(plan({.model = gpt2(gpt2_124m),
                          .mesh = {},
                          .global_batch_tokens = 12 * T,
                          .micro_batch_sequences = B},
                         0),
                    ArenaKind::pipeline),
              0);
}

// ---- parameters

// Elements of a unit with the padding for its shards. Tensors begin at multiples of 128 elements. Tensors
// that tensor-parallel ranks share come first, then those that each rank has whole. Both have norm blocks of
// their own, and shards consist of whole norm blocks.
std::int64_t elements(const RunPlan& plan, int unit) {
    const std::int64_t tensor = plan.spec.mesh.tensor, layers = gpt2_124m.layers;
    std::int64_t shared = 0, whole = 0;
    if (unit == wte_unit) {
        shared = Sizes(plan.spec.mesh.split()).vocabulary * C;
    } else if (unit == wpe_unit) {
        whole = T * C;
    } else if (unit == ln_f_unit(static_cast<int>(layers))) {
        whole = 2 * C;
    } else {
        for (const std::int64_t size : {3 * C * C, 3 * C, C * C, 4 * C * C, 4 * C, 4 * C * C})
            shared += round_up(size / tensor, 128);
        whole = 6 * C;  // layernorms, and the biases that are added after a sum
    }
    if (tensor > 1) shared = round_up(shared, norm_block_elements);
    return round_up(shared + whole, norm_block_elements * plan.spec.mesh.data_ranks());
}

TEST_F(PipelinePlans, StateIsThatOfTheStagesUnits) {
    for (int zero = 0; zero <= 3; ++zero) {
        SCOPED_TRACE(fmt::format("stage {} of ZeRO", zero));
        sharding = {.stage = zero, .shards = 4, .reduces_each_micro_batch = zero >= 2};
        for_all_splits([&](const std::vector<RunPlan>& plans) {
            for (const RunPlan& plan : plans) {
                std::int64_t all = 0, outside_blocks = 0;
                for (int unit = 0; unit <= ln_f_unit(12); ++unit) {
                    if (!plan.part().has_unit(unit)) continue;
                    all += elements(plan, unit);
                    const bool is_block = unit >= block_unit(0) && unit < ln_f_unit(12);
                    outside_blocks += is_block ? 0 : elements(plan, unit);
                }
                // The parameters of two blocks exist at a time.
                const std::int64_t two =
                    outside_blocks + std::min(2, layers_of(plan.part())) * elements(plan, block_unit(0));
                const std::int64_t shard = all / 4, updated = zero == 0 ? all : shard;
                EXPECT_EQ(bytes(plan, ArenaKind::parameters), element * (zero < 3 ? all : two + shard));
                EXPECT_EQ(bytes(plan, ArenaKind::gradients), 4 * (zero < 2 ? all : two + shard));
                EXPECT_EQ(bytes(plan, ArenaKind::master), 4 * updated);
                EXPECT_EQ(bytes(plan, ArenaKind::moments), 8 * updated);
            }
        });
    }
}

// Every unit belongs to one stage; wte belongs to the first and the last.
TEST_F(PipelinePlans, StagesHaveAllUnitsTogether) {
    for_all([](const std::vector<RunPlan>& plans) {
        for (int unit = 0; unit <= ln_f_unit(12); ++unit) {
            int holding = 0, counting = 0;
            for (const RunPlan& plan : plans) {
                holding += plan.part().has_unit(unit) ? 1 : 0;
                counting += plan.part().counts_unit(unit) ? 1 : 0;
            }
            EXPECT_EQ(holding, unit == wte_unit ? 2 : 1);
            EXPECT_EQ(counting, 1);
        }
        EXPECT_TRUE(plans.front().part().has_unit(wte_unit) && plans.back().part().has_unit(wte_unit));
    });
}

// ---- bytes that are sent

// Each border between two chunks passes the residual stream of every micro-batch forward, and its gradient
// back.
TEST_F(PipelinePlans, BytesBetweenStagesAreThoseOfTheFormula) {
    for (const int shards : {1, 2}) {
        sharding = {.stage = shards == 1 ? 0 : 3, .shards = shards, .reduces_each_micro_batch = true};
        for_all([&](const std::vector<RunPlan>& plans) {
            const PipelineSpec& spec = plans.front().pipeline;
            std::uint64_t sum = 0;
            for (int stage = 0; stage < std::ssize(plans); ++stage) {
                const RunPlan& plan = plans[static_cast<std::size_t>(stage)];
                // A stage sends forward from each chunk but the model's last, and back from each chunk but
                // the first.
                const bool is_end = stage == 0 || stage + 1 == spec.stages;
                const int borders = 2 * spec.virtual_stages - (is_end ? 1 : 0);
                EXPECT_EQ(plan.sent.stages,
                          static_cast<std::uint64_t>(borders * spec.micro_batches * activation));
                sum += plan.sent.stages;
                // The two copies of wte exchange one shard of their gradients.
                const std::int64_t wte = is_end ? 4 * elements(plan, wte_unit) / shards : 0;
                EXPECT_EQ(plan.sent.tied, static_cast<std::uint64_t>(wte));
                EXPECT_EQ(plan.sent.across, 0U);
            }
            EXPECT_EQ(sum,
                      static_cast<std::uint64_t>(2 * (spec.chunks() - 1) * spec.micro_batches * activation));
        });
    }
}

// ---- models that do not fit

TEST_F(PipelinePlans, TheLargestStageDecidesWhatFits) {
    RunSpec spec{.model = gpt2(gpt2_124m),
                 .dtype = DType::bf16,
                 .mesh = {.pipeline = 4},
                 .global_batch_tokens = 16 * T,
                 .micro_batch_sequences = 1};
    std::size_t largest = 0;
    for (int stage = 0; stage < 4; ++stage)
        largest = std::max(largest, plan(spec, stage).memory.total_bytes());
    for (int stage = 0; stage < 4; ++stage) {
        EXPECT_EQ(plan(spec, stage).largest_memory, largest);
        spec.machine.bytes = largest;
        EXPECT_NO_THROW(plan(spec, stage));
        spec.machine.bytes = largest - 1;
        EXPECT_THROW(plan(spec, stage), UserError) << "on every rank alike";
        spec.machine.bytes = 0;
    }
}

}  // namespace
}  // namespace llmc
