// Recompute: the actions of the list, the faults that its checks find, and the memory by the formula.
#include "llmc/model/part_lists.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "llmc/device/device.h"
#include "llmc/device/ops.h"
#include "llmc/model/units.h"
#include "llmc/parallel/step/activations.h"
#include "llmc/parallel/step/build_step.h"
#include "llmc/parallel/step/gathers_and_recomputes.h"
#include "llmc/parallel/step/step_streams.h"
#include "test/gpt2_units.h"
#include "test/unit/planted_step_fault.h"
#include "test/unit/step_specs.h"

namespace llmc {
namespace {

using enum RecomputeKind;

constexpr int layers = 6;

StepSpec spec_of(Recompute recompute, int micro_batches = 2, const Sharding& sharding = {}) {
    StepSpec spec = whole_spec(layers, sharding, micro_batches);
    spec.recompute = recompute;
    return spec;
}

void for_all(const std::function<void(const Recompute&)>& f) {
    for (const RecomputeKind kind : {selective, block}) {
        for (int every = 1; every <= layers; ++every) {
            SCOPED_TRACE(fmt::format("{}, every {}", name_of(kind), every));
            f({.kind = kind, .every = every});
        }
    }
}

// The blocks of the actions of one kind, in order.
std::vector<int> blocks_of(const Step& step, ActionKind kind, int micro_batch) {
    std::vector<int> blocks;
    for (const Action& action : step.actions) {
        if (action.kind == kind && layer_of(step.part, action.part) >= 0 && action.micro_batch == micro_batch)
            blocks.push_back(layer_of(step.part, action.part));
    }
    return blocks;
}

TEST(Recompute, IsOfEveryKthBlock) {
    for_all([](const Recompute& recompute) {
        int recomputing = 0;
        for (int i = 0; i < layers; ++i) recomputing += recompute.recomputes(i) ? 1 : 0;
        EXPECT_EQ(recomputing, layers / recompute.every);
        EXPECT_EQ(recompute.of(recompute.every - 1), recompute.kind);
        EXPECT_TRUE(whole_model(layers).recomputes_any(recompute));
        EXPECT_EQ(whole_model(layers / 2).recomputes_any(recompute), recompute.every <= layers / 2);
        // The second half of the model continues the numbers of the first.
        const StagePart last = part_of_stage({{0, layers / 2}, {layers / 2, layers}}, 2, 1);
        bool any = false;
        for (int i = layers / 2; i < layers; ++i) any = any || recompute.recomputes(i);
        EXPECT_EQ(last.recomputes_any(recompute), any);
    });
    EXPECT_FALSE(whole_model(layers).recomputes_any({}));
    EXPECT_FALSE((Recompute{.kind = none, .every = 2}.recomputes(1)));
}

// Each block that recomputes does so right before its backward pass. The last block does not: everything of
// its forward pass is still there.
TEST(Recompute, ComesBeforeTheBackwardThatNeedsIt) {
    for_all([](const Recompute& recompute) {
        const Step step = build_training_step(spec_of(recompute));
        check_step(step);
        std::vector<int> expected;
        for (int i = layers - 1; i >= 0; --i) {
            if (recompute.recomputes(i)) expected.push_back(i);
        }
        expected.erase(expected.begin());
        for (const int micro_batch : {0, 1})
            EXPECT_EQ(blocks_of(step, ActionKind::recompute, micro_batch), expected);
        for (std::size_t i = 0; i < step.actions.size(); ++i) {
            if (step.actions[i].kind != ActionKind::recompute) continue;
            EXPECT_EQ(step.actions[i + 1].kind, ActionKind::backward);
            EXPECT_EQ(step.actions[i + 1].part, step.actions[i].part);
            EXPECT_EQ(step.actions[i + 1].micro_batch, step.actions[i].micro_batch);
            EXPECT_EQ(step.actions[i + 1].slot, step.actions[i].slot);
            EXPECT_EQ(phase_of(step.actions[i].kind), Phase::backward);
        }
        for (const Step& list :
             {build_evaluation_step(spec_of(recompute, 1)), build_generation_step(spec_of(recompute, 1))}) {
            check_step(list);
            EXPECT_TRUE(blocks_of(list, ActionKind::recompute, 0).empty());
        }
    });
    EXPECT_TRUE(blocks_of(build_training_step(spec_of({})), ActionKind::recompute, 0).empty());
}

// A pipeline overlaps micro-batches. A block, also the last, recomputes what another micro-batch has
// overwritten.
TEST(Recompute, OfMicroBatchesInFlight) {
    const BufferUse of_block{BufferRole::recomputed, 0, block_unit(0)};
    const auto action = [&](ActionKind kind, int micro_batch) {
        Action made{.kind = kind,
                    .part = block_part(0),
                    .micro_batch = micro_batch,
                    .slot = micro_batch,
                    .reads = {{BufferRole::chunk_input, 0}},
                    .writes = {}};
        (kind == ActionKind::forward ? made.writes : made.reads).push_back(of_block);
        return made;
    };
    using enum ActionKind;
    Step step{.part = whole_model(1), .recompute = {.kind = block}, .micro_batches = 2};
    step.actions = {action(forward, 0), action(forward, 1), action(backward, 0), action(backward, 1)};
    insert_recomputes(step);
    std::vector<std::pair<ActionKind, int>> kinds;
    for (const Action& made : step.actions) kinds.emplace_back(made.kind, made.slot);
    EXPECT_EQ(kinds,
              (std::vector<std::pair<ActionKind, int>>{
                  {forward, 0}, {forward, 1}, {recompute, 0}, {backward, 0}, {recompute, 1}, {backward, 1}}));
}

// Sharded parameters are gathered once for both, as early as without recompute.
TEST(Recompute, SharesTheGatherOfItsBackward) {
    for (const int prefetch : {0, 1, 2, 5}) {
        for (const bool reshards : {true, false}) {
            const Sharding sharding{.stage = 3,
                                    .shards = 4,
                                    .reduces_each_micro_batch = true,
                                    .prefetch_units = prefetch,
                                    .reshards_after_forward = reshards};
            const Step plain = build_training_step(spec_of({}, 2, sharding));
            for_all([&](const Recompute& recompute) {
                Step step = build_training_step(spec_of(recompute, 2, sharding));
                check_step(step);
                // Without its recomputes, the list has the same order, except that a gather may now wait for
                // a recompute.
                for (std::size_t i = 0; i + 1 < step.actions.size(); ++i) {
                    if (step.actions[i].kind == ActionKind::recompute) {
                        EXPECT_EQ(step.actions[i + 1].kind, ActionKind::backward) << "a gather in between";
                    }
                }
                std::erase_if(step.actions,
                              [](const Action& action) { return action.kind == ActionKind::recompute; });
                ASSERT_EQ(step.actions.size(), plain.actions.size());
                for (std::size_t i = 0; i < plain.actions.size(); ++i) {
                    EXPECT_EQ(step.actions[i].kind, plain.actions[i].kind) << i;
                    EXPECT_EQ(step.actions[i].unit, plain.actions[i].unit) << i;
                }
            });
        }
    }
}

TEST(Recompute, IsPrinted) {
    const auto text = [&](const Recompute& recompute) {
        StepSpec spec = whole_spec(2, {}, 1);
        spec.recompute = recompute;
        return to_string(build_training_step(spec));
    };
    EXPECT_EQ(text({}).find("recompute"), std::string::npos);
    const std::string whole = text({.kind = block}), part = text({.kind = selective});
    EXPECT_NE(whole.find("1 data rank, recompute block\n"), std::string::npos) << whole;
    EXPECT_NE(whole.find("input, parameters h.0 -> recomputed h.0\n"), std::string::npos) << whole;
    EXPECT_NE(part.find("saved 0, input, parameters h.0 -> saved 0, recomputed h.0\n"), std::string::npos)
        << part;
    EXPECT_NE(text({.kind = block, .every = 2}).find("recompute block of 1 block in 2\n"), std::string::npos);
}

// ---- faults, planted in sound lists

void expect_fault(const Recompute& recompute, const std::function<void(std::vector<Action>&)>& plant,
                  const std::string& message) {
    Step step = build_training_step(spec_of(recompute));
    plant(step.actions);
    expect_found(std::move(step), message);
}

auto nth_recompute(std::vector<Action>& actions, int n) {
    return std::ranges::find_if(
        actions, [&](const Action& action) { return action.kind == ActionKind::recompute && n-- == 0; });
}

TEST(CheckStep, FindsWhatIsNotRecomputed) {
    for (const Recompute recompute : {Recompute{.kind = selective},
                                      Recompute{.kind = block},
                                      Recompute{.kind = selective, .every = 2},
                                      {.kind = block, .every = 3}}) {
        SCOPED_TRACE(fmt::format("{}, every {}", name_of(recompute.kind), recompute.every));
        // Loses each of the recomputes of both micro-batches.
        const int count = 2 * (layers / static_cast<int>(recompute.every) - 1);
        for (int n = 0; n < count; ++n) {
            const auto lose = [n](auto& actions) { actions.erase(nth_recompute(actions, n)); };
            expect_fault(recompute, lose, "reads what is to be recomputed first");
        }
    }
}

TEST(CheckStep, FindsARecomputeOfAnotherBlockOrMicroBatch) {
    const Recompute all{.kind = block};
    // A recompute comes before the backward pass of the block after it.
    expect_fault(
        all,
        [](auto& actions) {
            const auto second = nth_recompute(actions, 1);
            std::rotate(nth_recompute(actions, 0), second, second + 1);
        },
        "reads what is to be recomputed first");
    expect_fault(
        all, [](auto& actions) { nth_recompute(actions, 1)->part = block_part(5); }, "of another unit");
    expect_fault(
        all, [](auto& actions) { nth_recompute(actions, 0)->micro_batch = 1; }, "of another micro-batch");
    // The last block's activations are still there, unless the other micro-batch's forward pass comes in
    // between.
    expect_fault(
        all,
        [](auto& actions) {
            const auto later = std::ranges::find_if(actions, [](const Action& action) {
                return action.kind == ActionKind::forward && action.micro_batch == 1 &&
                       action.part == block_part(layers - 1);
            });
            Action forward = *later;
            forward.reads.clear();
            forward.slot = 1;
            actions.erase(later);
            const auto backward = std::ranges::find_if(
                actions, [](const Action& action) { return action.kind == ActionKind::backward; });
            actions.insert(backward, forward);
        },
        "reads what is to be recomputed first");
}

// ---- memory

// Bytes of a padded buffer with this many elements.
std::size_t bytes(std::int64_t elements, DType dtype) {
    const std::size_t size = static_cast<std::size_t>(elements) * size_of(dtype);
    return (size + buffer_alignment - 1) / buffer_alignment * buffer_alignment;
}

void expect_memory_of_the_formula(const TensorSplit& split, DType dtype, int slots) {
    const GPTConfig config{.layers = 5, .heads = 4, .channels = 24, .sequence_length = 8, .vocabulary = 40};
    const auto arena = [&](const Recompute& recompute) {
        MemoryLayout layout;
        const auto outline = outline_of(config);
        const ModelLists lists =
            derive_lists(*outline, {.split = split, .batch = 3, .dtype = dtype, .logits_rows = 4});
        lay_out_activations(layout, {.lists = &lists,
                                     .part = whole_model(outline),
                                     .in_flight = {.slots = slots, .chunk_inputs = slots},
                                     .norm_blocks = 10,
                                     .recompute = recompute});
        return layout.bytes(ArenaKind::activations);
    };
    const std::int64_t N = 3 * config.sequence_length, C = config.channels, R = split.ranks;
    const std::int64_t own_N = split.sequence_parallel ? N / R : N;
    const std::size_t light = 2 * bytes(own_N * C, dtype) + bytes(4 * N * C / R, dtype);
    // The whole block: these, the residual, attention's output, q, k and v, GELU's input, and the per-row
    // numbers.
    const std::size_t whole = light + bytes(own_N * C, dtype) + bytes(N * C / R, dtype) +
                              bytes(3 * N * C / R, dtype) + bytes(4 * N * C / R, dtype) +
                              4 * bytes(own_N, DType::fp32) + bytes(N * config.heads / R, DType::fp32);
    // The whole arena: slots with their inputs and outputs, the gradient, the tokens in use and the tokens
    // that come ahead. Also scratch of the running block and of the head, results and partial sums.
    const bool gathers = split.sequence_parallel;
    const std::size_t scratch = bytes(N * C, dtype) + bytes(3 * N * C / R, dtype) +
                                bytes(4 * N * C / R, dtype) + (gathers ? bytes(N * C, dtype) : 0);
    // Each rank stores 128 columns.
    const std::size_t told = R > 1 ? bytes(R * 4 * 3, DType::fp32) + bytes(R * 128, dtype) : 0;
    const std::size_t head = bytes(own_N * C, dtype) + 2 * bytes(own_N, DType::fp32) + bytes(N * C, dtype) +
                             bytes(4 * 128, dtype) + bytes(N, DType::fp32) + told +
                             (gathers ? bytes(N * C, dtype) : 0);
    const auto all_slots = static_cast<std::size_t>(slots);
    EXPECT_EQ(arena({}), all_slots * (5 * whole + 6 * bytes(own_N * C, dtype)) + bytes(own_N * C, dtype) +
                             4 * bytes(N, DType::int32) + scratch + head + bytes(2, DType::fp64) +
                             bytes(10, DType::fp32));
    for (const std::int64_t every : {1, 2, 3, 5}) {
        // Recomputed buffers exist once.
        const auto lost = static_cast<std::size_t>(slots * (config.layers / every) - 1);
        EXPECT_EQ(arena({.kind = selective, .every = every}), arena({}) - lost * light);
        EXPECT_EQ(arena({.kind = block, .every = every}), arena({}) - lost * whole);
    }
    EXPECT_EQ(arena({.kind = block, .every = 6}), arena({}));
}

TEST(Recompute, TakesTheMemoryOfTheFormula) {
    for (const TensorSplit& split : {TensorSplit{}, {2, false}, {2, true}, {4, false}, {4, true}})
        for (const DType dtype : {DType::fp32, DType::bf16})
            for (const int slots : {1, 3}) {
                SCOPED_TRACE(fmt::format("{} tensor ranks, tokens divided: {}, {} slots", split.ranks,
                                         split.sequence_parallel, slots));
                expect_memory_of_the_formula(split, dtype, slots);
            }
}

// ---- the same bits

// Selective recompute normalises the rounded residual. The result must have the bits of the fused operation,
// which normalised the sum.
TEST(Recompute, ALayerNormOfTheResidualHasTheBitsOfTheFusedOne) {
    const std::unique_ptr<Device> device = make_cpu_device(2);
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        with_dtype(dtype, [&](auto element) {
            using X = decltype(element);
            for (const std::int64_t C : {1, 7, 20, 64, 100, 769}) {
                constexpr std::int64_t N = 37;
                std::mt19937 random(static_cast<unsigned>(C));
                std::normal_distribution<float> normal(0.3F, 2);
                const auto drawn = [&](std::int64_t n) {
                    std::vector<X> values(static_cast<std::size_t>(n));
                    for (X& value : values) value = from_float<X>(normal(random));
                    return values;
                };
                const auto tensor = [](auto& values, const Shape& shape, DType type) {
                    return Tensor{reinterpret_cast<std::byte*>(values.data()), type, shape};
                };
                std::vector<X> in1 = drawn(N * C), in2 = drawn(N * C), gamma = drawn(C), beta = drawn(C);
                std::vector<X> residual(in1.size()), out(in1.size()), again(in1.size());
                std::vector<float> mean(N), rstd(N), mean_again(N), rstd_again(N);
                const Shape rows{N, C}, row{C}, column{N};
                device->ops().run(FusedResidualLayerNormForward{
                    tensor(residual, rows, dtype), tensor(out, rows, dtype),
                    tensor(mean, column, DType::fp32), tensor(rstd, column, DType::fp32),
                    tensor(in1, rows, dtype), tensor(in2, rows, dtype), tensor(gamma, row, dtype),
                    tensor(beta, row, dtype)});
                device->ops().run(
                    LayerNormForward{tensor(again, rows, dtype), tensor(mean_again, column, DType::fp32),
                                     tensor(rstd_again, column, DType::fp32), tensor(residual, rows, dtype),
                                     tensor(gamma, row, dtype), tensor(beta, row, dtype)});
                EXPECT_EQ(std::memcmp(out.data(), again.data(), out.size() * sizeof(X)), 0) << C;
                EXPECT_EQ(mean, mean_again);
                EXPECT_EQ(rstd, rstd_again);
            }
        });
    }
}

}  // namespace
}  // namespace llmc
