// The list of actions: its contents, the faults that its checks find, and the values computed from it.
#include "llmc/parallel/step/step.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/model/units.h"
#include "llmc/parallel/step/build_step.h"
#include "llmc/parallel/step/step_streams.h"
#include "test/gpt2_units.h"
#include "test/unit/planted_step_fault.h"
#include "test/unit/step_lists.h"
#include "test/unit/step_specs.h"

namespace llmc {
namespace {

constexpr int layers = 3, micro_batches = 2;
const StepSpec& spec() {
    static const StepSpec made = whole_spec(layers, {.shards = 4}, micro_batches);
    return made;
}
// The same specification with gradients in bf16.
const StepSpec& rounding_spec() {
    static const StepSpec made = whole_spec(layers, {.shards = 4}, micro_batches, true);
    return made;
}

TEST(Step, HasEveryPartOfEveryMicroBatch) {
    const Step step = build_training_step(spec());
    check_step(step);
    constexpr int units = layers + 3;
    EXPECT_EQ(count(step, ActionKind::load), micro_batches);
    EXPECT_EQ(count(step, ActionKind::forward), micro_batches * (layers + 1));
    EXPECT_EQ(count(step, ActionKind::backward), micro_batches * (layers + 2));
    EXPECT_EQ(count(step, ActionKind::zero), units);
    EXPECT_EQ(count(step, ActionKind::reduce_scatter), units);
    EXPECT_EQ(count(step, ActionKind::gather_gradients), units);
    EXPECT_EQ(count(step, ActionKind::update), units);
    EXPECT_EQ(count(step, ActionKind::square), 1);
    EXPECT_EQ(count(step, ActionKind::gather_squares), 1);
    EXPECT_EQ(count(step, ActionKind::norm), 1);
}

TEST(Step, RoundsTheSumsOfEveryMicroBatchIntoTheGradients) {
    const Step step = build_training_step(rounding_spec());
    check_step(step);
    constexpr int units = layers + 3;
    EXPECT_EQ(count(step, ActionKind::zero), units * micro_batches);
    EXPECT_EQ(count(step, ActionKind::round), units);
    EXPECT_EQ(count(step, ActionKind::accumulate), units * (micro_batches - 1));
    // The backward pass itself does not write the gradients, and blocks share one buffer for their sums.
    std::set<int> sums;
    for (const Action& action : step.actions) {
        if (action.kind != ActionKind::backward) continue;
        for (const BufferUse& use : action.writes) {
            EXPECT_NE(use.role, BufferRole::gradients);
            if (use.role == BufferRole::gradient_sums) sums.insert(use.index);
        }
    }
    EXPECT_EQ(sums, (std::set<int>{wte_unit, wpe_unit, block_unit(0), ln_f_unit(layers)}));
    // Without these actions, the list equals the list for gradients in fp32.
    const Step plain = build_training_step(spec());
    EXPECT_EQ(count(plain, ActionKind::round) + count(plain, ActionKind::accumulate), 0);
    std::vector<ActionKind> rest, expected;
    for (const Action& action : step.actions) {
        const bool added = action.kind == ActionKind::round || action.kind == ActionKind::accumulate ||
                           action.kind == ActionKind::zero;
        if (!added) rest.push_back(action.kind);
    }
    for (const Action& action : plain.actions) {
        if (action.kind != ActionKind::zero) expected.push_back(action.kind);
    }
    EXPECT_EQ(rest, expected);
}

TEST(Step, OneProcessCommunicatesNothing) {
    const Step step = build_training_step(whole_spec(2, {.shards = 1}, 3));
    check_step(step);
    for (const Action& action : step.actions) EXPECT_EQ(action.stream, StreamKind::compute);
}

TEST(Step, ReducesAUnitRightAfterItsLastBackward) {
    const Step step = build_training_step(spec());
    for (int block = 0; block < layers; ++block) {
        const std::size_t reduce = find(step, [&](const Action& action) {
            return action.kind == ActionKind::reduce_scatter && action.unit == block_unit(block);
        });
        const Action& before = step.actions[reduce - 1];
        EXPECT_EQ(before.kind, ActionKind::backward);
        EXPECT_EQ(before.part, block_part(block));
        EXPECT_EQ(before.micro_batch, micro_batches - 1);
    }
}

// The reduction of a unit waits only for the backward pass that completes its gradients. So it overlaps the
// backward pass of the earlier units. An action that needs all gradients waits for the last of them.
void expect_waits_for_what_is_needed(const StepSpec& of) {
    const Step step = build_training_step(of);
    const auto is = [](ActionKind kind, int unit) {
        return [=](const Action& action) { return action.kind == kind && action.unit == unit; };
    };
    for (int block = 0; block < layers; ++block) {
        const int unit = block_unit(block);
        const std::size_t reduce = find(step, is(ActionKind::reduce_scatter, unit));
        const std::size_t gather = find(step, is(ActionKind::gather_gradients, unit));
        const std::vector<int> made = {static_cast<int>(reduce) - 1};
        EXPECT_EQ(step.actions[reduce].after, made);
        EXPECT_EQ(step.actions[gather].after, made);
    }
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        if (phase_of(action.kind) == Phase::forward || phase_of(action.kind) == Phase::backward) {
            EXPECT_TRUE(action.after.empty());
        }
        if (action.kind == ActionKind::square) {
            const auto last = static_cast<int>(find(step, is(ActionKind::gather_gradients, wte_unit)));
            EXPECT_EQ(action.after, std::vector<int>{last});
        }
    }
}

TEST(Step, StreamsWaitForWhatTheyNeedAndNoMore) {
    expect_waits_for_what_is_needed(spec());
    expect_waits_for_what_is_needed(rounding_spec());
}

TEST(Step, OneMicroBatchIsInFlight) {
    const BuffersInFlight in_flight = buffers_in_flight(build_training_step(spec()));
    EXPECT_EQ(in_flight.slots, 1);
    EXPECT_EQ(in_flight.chunk_inputs, 1);
    EXPECT_EQ(in_flight.residual_gradients, 1);
    EXPECT_EQ(in_flight.tokens, 1);
}

TEST(Step, PrintsALineAnAction) {
    const Step step = build_training_step(whole_spec(1, {.shards = 2}, 1));
    const std::string text = to_string(step);
    EXPECT_EQ(std::ranges::count(text, '\n'), static_cast<std::int64_t>(step.actions.size()) + 3);
    EXPECT_NE(text.find("reduce_scatter"), std::string::npos);
    EXPECT_NE(text.find("gradients h.0"), std::string::npos);
}

// Every second or third block writes its gradients in a different pass from the others. So blocks that take
// turns with a buffer are not neighbours.
TEST(Step, BlocksThatRecomputeMayLieAnywhere) {
    const auto expect_sound = [](const PipelineSpec& pipeline, int blocks, const StepSpec& rest) {
        std::vector<Step> stages;
        for (const StepSpec& of : stage_specs(pipeline, blocks, rest))
            check_step(stages.emplace_back(build_training_step(of)));
        check_stages(stages);
    };
    for (const PipelineSchedule schedule : all_pipeline_schedules)
        for (const int blocks : {4, 5, 6, 7, 8, 12})
            for (const int p : {2, 3, 4})
                for (const int every : {1, 2, 3, 4})
                    for (const RecomputeKind kind : {RecomputeKind::selective, RecomputeKind::block})
                        for (const bool rounds : {false, true})
                            for (int zero = 0; zero <= 3; ++zero) {
                                const bool is_interleaved = schedule == PipelineSchedule::interleaved;
                                const PipelineSpec pipeline{.schedule = schedule,
                                                            .stages = p,
                                                            .virtual_stages = is_interleaved ? 2 : 1,
                                                            .micro_batches = is_interleaved ? p : 3};
                                if (pipeline.chunks() > blocks) continue;
                                const Sharding sharding{
                                    .stage = zero, .shards = 2, .reduces_each_micro_batch = zero > 0};
                                SCOPED_TRACE(fmt::format(
                                    "{}, {} blocks, {} stages, {} every {}, ZeRO-{}, gradients rounded: {}",
                                    name_of(schedule), blocks, p, name_of(kind), every, zero, rounds));
                                ASSERT_NO_THROW(expect_sound(pipeline, blocks,
                                                             {.part = {},
                                                              .pipeline = {},
                                                              .sharding = sharding,
                                                              .rounds_gradients = rounds,
                                                              .recompute = {.kind = kind, .every = every}}));
                            }
}

// ---- check_step: each fault is planted in a sound list

void expect_fault(const std::function<void(std::vector<Action>&)>& plant, const std::string& message,
                  const StepSpec& sound = spec()) {
    Step step = build_training_step(sound);
    plant(step.actions);
    expect_found(std::move(step), message);
}

TEST(CheckStep, FindsAMissingForward) {
    expect_fault([](auto& actions) { erase_first(actions, ActionKind::forward); }, "nobody wrote");
}

TEST(CheckStep, FindsAnActivationOfAnotherMicroBatch) {
    expect_fault(
        [](auto& actions) {
            // The second micro-batch's first forward is missing, so its blocks would read the first's
            // residual.
            const auto lost = std::ranges::find_if(actions, [](const Action& action) {
                return action.kind == ActionKind::forward && action.micro_batch == 1;
            });
            actions.erase(lost);
        },
        "another micro-batch");
}

TEST(CheckStep, FindsGradientsThatAreNotZeroed) {
    expect_fault([](auto& actions) { erase_first(actions, ActionKind::zero); }, "never zeroed");
}

TEST(CheckStep, FindsABackwardAfterItsReduction) {
    expect_fault(
        [](auto& actions) {
            const auto reduce = std::ranges::find_if(
                actions, [](const Action& action) { return action.kind == ActionKind::reduce_scatter; });
            std::iter_swap(reduce, reduce - 1);
        },
        "were reduced");
}

void expect_rounding_fault(const std::function<void(std::vector<Action>&)>& plant,
                           const std::string& message) {
    expect_fault(plant, message, rounding_spec());
}

TEST(CheckStep, FindsGradientSumsThatAreNotZeroed) {
    expect_rounding_fault([](auto& actions) { erase_first(actions, ActionKind::zero); }, "not zeroed");
    expect_rounding_fault(
        [](auto& actions) {
            // The zeroing in the second micro-batch.
            actions.erase(std::ranges::find_if(actions, [seen = 0](const Action& action) mutable {
                return action.kind == ActionKind::zero && action.unit == block_unit(1) && ++seen == 2;
            }));
        },
        "not zeroed");
}

TEST(CheckStep, FindsGradientSumsOfAnotherUnit) {
    // The next block's sums are zeroed before the last block's are added to the gradients.
    expect_rounding_fault(
        [](auto& actions) {
            const auto zero = std::ranges::find_if(actions, [](const Action& action) {
                return action.kind == ActionKind::zero && action.unit == block_unit(1);
            });
            std::iter_swap(zero, zero - 1);
        },
        "that the gradients lack");
    expect_rounding_fault(
        [](auto& actions) {
            std::ranges::find_if(actions, [](const Action& action) {
                return action.kind == ActionKind::zero && action.unit == block_unit(1);
            })->unit = block_unit(0);
        },
        "of another unit");
    expect_rounding_fault(
        [](auto& actions) {
            std::ranges::find_if(actions, [](const Action& action) {
                return action.kind == ActionKind::round && action.unit == block_unit(1);
            })->unit = block_unit(0);
        },
        "of another unit");
}

TEST(CheckStep, FindsGradientSumsThatAreLost) {
    expect_rounding_fault([](auto& actions) { erase_first(actions, ActionKind::round); },
                          "the gradients lack");
    // The last of all, after which no action zeroes the sums.
    expect_rounding_fault(
        [](auto& actions) {
            const auto last = std::ranges::find_if(
                actions.rbegin(), actions.rend(),
                [](const Action& action) { return action.kind == ActionKind::accumulate; });
            actions.erase(std::next(last).base());
        },
        "never reach");
}

TEST(CheckStep, FindsGradientSumsThatAreTakenTooEarly) {
    // wte's sums are taken before the embedding's backward pass adds to them.
    expect_rounding_fault(
        [](auto& actions) {
            const auto round = std::ranges::find_if(actions, [](const Action& action) {
                return action.kind == ActionKind::round && action.unit == wte_unit;
            });
            const auto backward = std::ranges::find_if(actions, [](const Action& action) {
                return action.kind == ActionKind::backward && action.part == embedding_part;
            });
            std::rotate(backward, round, round + 1);
        },
        "not zeroed");
    expect_rounding_fault(
        [](auto& actions) {
            const auto round = std::ranges::find_if(
                actions, [](const Action& action) { return action.kind == ActionKind::round; });
            actions.insert(round, *round);
        },
        "that nobody made");
}

TEST(CheckStep, FindsGradientsThatAreOverwrittenOrReducedTooEarly) {
    expect_rounding_fault(
        [](auto& actions) {
            std::ranges::find_if(actions, [](const Action& action) {
                return action.kind == ActionKind::accumulate;
            })->kind = ActionKind::round;
        },
        "still needed");
    expect_rounding_fault(
        [](auto& actions) {
            const auto reduce = std::ranges::find_if(
                actions, [](const Action& action) { return action.kind == ActionKind::reduce_scatter; });
            std::iter_swap(reduce, reduce - 1);
        },
        "were reduced");
}

TEST(CheckStep, FindsAMissingGather) {
    expect_fault([](auto& actions) { erase_first(actions, ActionKind::gather_gradients); }, "only a shard");
}

TEST(CheckStep, FindsAnUpdateThatComesTooLate) {
    const auto move_behind = [](std::vector<Action>& actions, const Action& update, std::size_t place) {
        actions.insert(actions.begin() + static_cast<std::ptrdiff_t>(place) + 1, update);
        actions.erase(std::ranges::find_if(actions, [&](const Action& action) {
            return action.kind == ActionKind::update && action.unit == update.unit;
        }));
    };
    const auto is_update_of = [](int unit) {
        return [=](const Action& action) { return action.kind == ActionKind::update && action.unit == unit; };
    };
    // Whole parameters, and shards that a gather reads.
    for (const int stage : {0, 1, 3}) {
        expect_fault(
            [&](auto& actions) {
                const Action update = *std::ranges::find_if(actions, is_update_of(block_unit(1)));
                const auto reader = std::ranges::find_if(actions, [&](const Action& action) {
                    return stage == 3
                               ? action.kind == ActionKind::gather_parameters && action.unit == block_unit(1)
                               : action.kind == ActionKind::forward && action.part == block_part(1);
                });
                move_behind(actions, update, static_cast<std::size_t>(reader - actions.begin()));
            },
            "reads parameters before their update",
            whole_spec(layers, {.stage = stage, .shards = 4}, micro_batches));
    }
}

TEST(CheckStep, FindsUpdatedParametersThatAreNotGathered) {
    expect_fault([](auto& actions) { erase_first(actions, ActionKind::gather_parameters); }, "not gathered",
                 whole_spec(layers, {.stage = 1, .shards = 4}, micro_batches));
}

TEST(CheckStep, FindsAUnitWithoutUpdate) {
    expect_fault([](auto& actions) { erase_first(actions, ActionKind::update); }, "never updated");
}

TEST(CheckStep, FindsAStepWithoutNorm) {
    expect_fault([](auto& actions) { erase_first(actions, ActionKind::norm); }, "never made");
}

void expect_all_waits_are_needed(const StepSpec& of) {
    Step step = build_training_step(of);
    int found = 0, waiting = 0;
    for (Action& action : step.actions) {
        if (action.after.empty()) continue;
        ++waiting;
        const std::vector<int> after = action.after;
        --action.after.front();
        try {
            check_step(step);
        } catch (const ProgrammingError& fault) {
            found += std::string(fault.what()).find("may run before") != std::string::npos ? 1 : 0;
        }
        action.after = after;
    }
    EXPECT_EQ(found, waiting);
    EXPECT_GT(waiting, 3 * layers);
    check_step(step);
}

TEST(CheckStep, FindsStreamsThatDoNotWait) {
    expect_all_waits_are_needed(spec());
    expect_all_waits_are_needed(rounding_spec());
}

TEST(CheckStep, FindsAWaitForALaterAction) {
    Step step = build_training_step(spec());
    step.actions[5].after = {5};
    EXPECT_THROW(check_step(step), ProgrammingError);
}

TEST(CheckStep, FindsASecondUpdate) {
    expect_fault(
        [](auto& actions) {
            actions.push_back(*std::ranges::find(actions, ActionKind::update, &Action::kind));
        },
        "second time");
}

}  // namespace
}  // namespace llmc
