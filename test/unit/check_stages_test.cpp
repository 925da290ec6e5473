// The lists of all stages of a pipeline together. The lists of every schedule agree, and planted faults are
// found. step_test.cpp tests one list alone, pipeline_test.cpp the schedules.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/model/units.h"
#include "llmc/parallel/step/build_step.h"
#include "llmc/parallel/step/step.h"
#include "test/gpt2_units.h"
#include "test/unit/step_specs.h"

namespace llmc {
namespace {

using enum ActionKind;
using Lists = std::vector<Step>;
using Build = Step (*)(const StepSpec&);

Lists lists_of(const std::vector<StepSpec>& specs, Build build) {
    Lists lists;
    for (const StepSpec& spec : specs) lists.push_back(build(spec));
    return lists;
}

void expect_sound(const std::vector<StepSpec>& specs, Build build, std::string_view name) {
    try {
        const Lists lists = lists_of(specs, build);
        for (const Step& list : lists) check_step(list);
        check_stages(lists);
    } catch (const ProgrammingError& fault) {
        const StepSpec& spec = specs.front();
        ADD_FAILURE() << fault.what() << "\nof " << name << ", stage " << spec.sharding.stage << " of ZeRO, "
                      << spec.sharding.shards << " x " << spec.sharding.replicas << ", reduced each "
                      << spec.sharding.reduces_each_micro_batch << ", rounds " << spec.rounds_gradients
                      << ", recompute " << name_of(spec.recompute.kind);
    }
}

TEST(Stages, AgreeInEverySchedule) {
    int checked = 0;
    for_all_pipelines([&](const PipelineSpec& pipeline) {
        // Chunks of 1 and of 2 blocks.
        const bool are_single =
            pipeline.schedule == PipelineSchedule::breadth_first && pipeline.micro_batches % 2 == 1;
        const int layers = pipeline.chunks() + (are_single ? 0 : pipeline.chunks() / 2);
        for_all_settings([&](const StepSpec& spec) {
            const std::vector<StepSpec> specs = stage_specs(pipeline, layers, spec);
            expect_sound(specs, build_training_step, "training");
            ++checked;
            if (spec.rounds_gradients) return;
            expect_sound(specs, build_evaluation_step, "evaluation");
            if (pipeline.micro_batches == 1) expect_sound(specs, build_generation_step, "generation");
            expect_sound(specs, build_parameter_gathers, "parameter gathers");
        });
    });
    EXPECT_GT(checked, 1000);
}

// ---- each fault is planted in sound lists, and must be found

class PlantedFaults : public testing::TestWithParam<PipelineSchedule> {
  protected:
    PlantedFaults() {
        const bool is_interleaved = GetParam() == PipelineSchedule::interleaved;
        const PipelineSpec pipeline{.schedule = GetParam(),
                                    .stages = 3,
                                    .virtual_stages = is_interleaved ? 2 : 1,
                                    .micro_batches = 6};
        lists = lists_of(stage_specs(pipeline, 6, {.sharding = {.shards = 2}}), build_training_step);
        check_stages(lists);
    }

    // The n-th action of a kind.
    std::size_t find(std::size_t stage, ActionKind kind, int n = 0) const {
        const std::vector<Action>& actions = lists[stage].actions;
        for (std::size_t i = 0; i < actions.size(); ++i) {
            if (actions[i].kind == kind && n-- == 0) return i;
        }
        ADD_FAILURE() << "no " << name_of(kind);
        return 0;
    }
    std::size_t last(std::size_t stage, ActionKind kind) const {
        const std::vector<Action>& actions = lists[stage].actions;
        const auto is = [&](const Action& action) { return action.kind == kind; };
        const auto found = std::ranges::find_if(actions.rbegin(), actions.rend(), is);
        return static_cast<std::size_t>(actions.rend() - found - 1);
    }
    void drop(std::size_t stage, std::size_t i) {
        lists[stage].actions.erase(lists[stage].actions.begin() + static_cast<std::ptrdiff_t>(i));
    }
    void swap(std::size_t stage, std::size_t i, std::size_t j) {
        std::swap(lists[stage].actions[i], lists[stage].actions[j]);
    }
    void move(std::size_t stage, std::size_t from, std::size_t to) {
        const auto begin = lists[stage].actions.begin();
        const auto at = [&](std::size_t i) { return begin + static_cast<std::ptrdiff_t>(i); };
        from < to ? std::rotate(at(from), at(from + 1), at(to + 1))
                  : std::rotate(at(to), at(from), at(from + 1));
    }

    // The message of the fault that the check of all stages finds, or the check of one stage.
    std::string found_in_stages() {
        return found([&] { check_stages(lists); });
    }
    std::string found_in(std::size_t stage) {
        return found([&] { check_step(lists[stage]); });
    }

    Lists lists;

  private:
    std::string found(const std::function<void()>& check) {
        for (Step& list : lists) order_streams(list);
        try {
            check();
        } catch (const ProgrammingError& fault) {
            return fault.what();
        }
        return "nothing";
    }
};

void expect_says(const std::string& message, const std::string& words) {
    EXPECT_NE(message.find(words), std::string::npos) << message;
}

constexpr std::array transfers = {send_activation, receive_activation, send_gradient, receive_gradient};

// The middle stage has transfers of all kinds.
TEST_P(PlantedFaults, AMissingTransfer) {
    const Lists sound = lists;
    for (const ActionKind kind : transfers) {
        SCOPED_TRACE(name_of(kind));
        for (const int n : {0, 3}) {
            lists = sound;
            drop(1, find(1, kind, n));
            const std::string message = found_in_stages();
            EXPECT_TRUE(message.find("waits for ever") != std::string::npos ||
                        message.find("receives it for") != std::string::npos)
                << message;
        }
        // After the last transfer no other comes that could be taken for it.
        lists = sound;
        drop(1, last(1, kind));
        expect_says(found_in_stages(), "waits for ever");
        lists = sound;
        if (kind != receive_activation && kind != receive_gradient) continue;
        drop(1, find(1, kind));
        const std::string message = found_in(1);
        EXPECT_TRUE(message.find("reads an activation") != std::string::npos) << message;
    }
}

TEST_P(PlantedFaults, TransfersInAnotherOrder) {
    const Lists sound = lists;
    for (const ActionKind kind : transfers) {
        SCOPED_TRACE(name_of(kind));
        lists = sound;
        swap(1, find(1, kind), find(1, kind, 1));
        const std::string message = found_in_stages();
        EXPECT_TRUE(message.find("receives it for") != std::string::npos ||
                    message.find("waits for ever") != std::string::npos)
            << message;
    }
}

TEST_P(PlantedFaults, TransfersOfAnotherMicroBatch) {
    for (const ActionKind kind : transfers) {
        SCOPED_TRACE(name_of(kind));
        int& micro_batch = lists[1].actions[find(1, kind)].micro_batch;
        const int right = std::exchange(micro_batch, 5);
        expect_says(found_in_stages(), "micro-batch 5");
        lists[1].actions[find(1, kind)].micro_batch = right;
    }
    EXPECT_EQ(found_in_stages(), "nothing");
}

TEST_P(PlantedFaults, TiedGradientsThatOneStageDoesNotSum) {
    const Lists sound = lists;
    for (const std::size_t stage : {0, 2}) {
        lists = sound;
        drop(stage, find(stage, sum_tied));
        expect_says(found_in_stages(), "waits for ever");
        expect_says(found_in(stage), "takes tied gradients of one stage");
    }
}

TEST_P(PlantedFaults, TiedGradientsThatAreSummedTwice) {
    for (const std::size_t stage : {0, 2}) {
        const auto at = static_cast<std::ptrdiff_t>(find(stage, sum_tied));
        std::vector<Action>& actions = lists[stage].actions;
        actions.insert(actions.begin() + at, actions[static_cast<std::size_t>(at)]);
        expect_says(found_in(stage), "a second time");
    }
}

// A loss is reduced too early: all stages would wait for one that waits for them to receive.
TEST_P(PlantedFaults, ALossThatIsReducedBeforeAllIsSent) {
    const Lists sound = lists;
    for (const std::size_t stage : {0, 1}) {
        lists = sound;
        move(stage, find(stage, reduce_loss), last(stage, send_activation));
        expect_says(found_in_stages(), "waits for ever");
    }
    lists = sound;
    move(1, find(1, reduce_loss), last(1, send_gradient));
    expect_says(found_in_stages(), "waits for ever");
}

TEST_P(PlantedFaults, WhatOneStageAloneDoesNotDo) {
    const Lists sound = lists;
    for (const ActionKind kind : {reduce_loss, gather_squares}) {
        for (const std::size_t stage : {0, 1, 2}) {
            lists = sound;
            drop(stage, find(stage, kind));
            expect_says(found_in_stages(), "waits for ever");
        }
    }
}

TEST_P(PlantedFaults, TwoMicroBatchesInOneSlot) {
    if (GetParam() == PipelineSchedule::naive) return;  // it has one slot
    std::vector<Action>& actions = lists[0].actions;
    ASSERT_GT(buffers_in_flight(lists[0]).slots, 1);
    for (Action& action : actions) action.slot = 0;
    const std::string message = found_in(0);
    EXPECT_TRUE(message.find("reads an activation of another micro-batch") != std::string::npos) << message;
}

TEST_P(PlantedFaults, TwoMicroBatchesInOneInput) {
    std::vector<Action>& actions = lists[1].actions;
    ASSERT_GT(buffers_in_flight(lists[1]).chunk_inputs, 1);
    for (Action& action : actions) {
        for (auto* uses : {&action.reads, &action.writes}) {
            for (BufferUse& use : *uses) {
                if (use.role == BufferRole::chunk_input) use.index = 0;
            }
        }
    }
    expect_says(found_in(1), "of another micro-batch");
}

// A block that recomputes has an undivided backward pass. It recomputes once for that pass. With sharded
// parameters, its parameters are also gathered once for the pass.
TEST(ZeroBubble, RecomputesOnce) {
    const PipelineSpec pipeline{.schedule = PipelineSchedule::zb_h1, .stages = 3, .micro_batches = 7};
    const Sharding sharding{.stage = 3, .shards = 2};
    const std::vector<Step> plain =
        lists_of(stage_specs(pipeline, 7, {.sharding = sharding}), build_training_step);
    for (const RecomputeKind kind : {RecomputeKind::selective, RecomputeKind::block}) {
        for (const int every : {1, 2}) {
            const StepSpec spec{.sharding = sharding, .recompute = {.kind = kind, .every = every}};
            const std::vector<Step> lists = lists_of(stage_specs(pipeline, 7, spec), build_training_step);
            for (std::size_t stage = 0; stage < lists.size(); ++stage) {
                const auto gathers = [&](const Step& list) {
                    return std::ranges::count(list.actions, gather_parameters, &Action::kind);
                };
                EXPECT_EQ(gathers(lists[stage]), gathers(plain[stage]));
                std::map<std::pair<int, int>, std::vector<ActionKind>> passes;
                for (const Action& action : lists[stage].actions) {
                    if (layer_of(lists[stage].part, action.part) >= 0 &&
                        action.stream == StreamKind::compute && action.micro_batch >= 0 &&
                        action.kind != forward)
                        passes[{layer_of(lists[stage].part, action.part), action.micro_batch}].push_back(
                            action.kind);
                }
                for (auto& [pass, kinds] : passes) {
                    if (!spec.recompute.recomputes(pass.first)) {
                        EXPECT_EQ(kinds, (std::vector{backward_input, backward_weight}));
                        continue;
                    }
                    if (kinds.front() == recompute) kinds.erase(kinds.begin());
                    EXPECT_EQ(kinds, std::vector{backward});
                }
            }
        }
    }
}

TEST(ZeroBubble, GathersParametersForWhatIsRecomputed) {
    const PipelineSpec pipeline{.schedule = PipelineSchedule::zb_h1, .stages = 2, .micro_batches = 4};
    const StepSpec spec{.sharding = {.stage = 3, .shards = 2},
                        .recompute = {.kind = RecomputeKind::selective}};
    for (Step list : lists_of(stage_specs(pipeline, 8, spec), build_training_step)) {
        const auto is = [](const Action& action) {
            return action.kind == recompute && std::ranges::find(action.reads, BufferRole::parameters,
                                                                 &BufferUse::role) != action.reads.end();
        };
        EXPECT_EQ(std::ranges::count_if(list.actions, is),
                  std::ranges::count(list.actions, recompute, &Action::kind));
        const auto first = std::ranges::find_if(list.actions, is);
        ASSERT_NE(first, list.actions.end());
        std::erase_if(first->reads, [](const BufferUse& use) { return use.role == BufferRole::parameters; });
        try {
            check_step(list);
            ADD_FAILURE() << "not found";
        } catch (const ProgrammingError& fault) {
            expect_says(fault.what(), "recomputes without parameters");
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Schedules, PlantedFaults, testing::ValuesIn(all_pipeline_schedules),
                         [](const auto& schedule) {
                             std::string name = "_" + std::string(name_of(schedule.param));
                             std::ranges::replace(name, '-', '_');
                             return name;
                         });

}  // namespace
}  // namespace llmc
