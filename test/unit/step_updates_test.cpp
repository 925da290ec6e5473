// The updates of a step in the list of the next one, and the actions of what is on a disk.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "llmc/parallel/step/build_step.h"
#include "llmc/parallel/step/step.h"
#include "test/gpt2_units.h"
#include "test/unit/planted_step_fault.h"
#include "test/unit/step_lists.h"
#include "test/unit/step_specs.h"

namespace llmc {
namespace {

constexpr int layers = 3, micro_batches = 2;

// Each unit is updated before anything else uses it, and not much earlier: while one unit is needed, the next is
// updated. The stages of a pipeline update first, while most would wait for their first input.
TEST(Step, BeginsWithTheUpdatesOfTheStepBefore) {
    for (const int zero : {0, 1, 2, 3}) {
        const Step step =
            build_training_step(whole_spec(layers, {.stage = zero, .shards = 4}, micro_batches));
        check_step(step);
        std::vector<int> order;
        for (const Action& action : step.actions)
            if (action.kind == ActionKind::update) order.push_back(action.unit);
        EXPECT_EQ(order, (std::vector<int>{wte_unit, wpe_unit, block_unit(0), block_unit(1), block_unit(2),
                                           ln_f_unit(layers)}));
        const auto forward = find(step, [](const Action& action) {
            return action.kind == ActionKind::forward && action.part == block_part(0);
        });
        const auto update = [&](int unit) {
            return find(step, [&](const Action& action) {
                return action.kind == ActionKind::update && action.unit == unit;
            });
        };
        if (zero < 3) {
            EXPECT_LT(update(block_unit(1)), forward);
            EXPECT_GT(update(block_unit(2)), forward);
        }
    }
    const PipelineSpec pipeline{.schedule = PipelineSchedule::one_f_one_b, .stages = 2, .micro_batches = 2};
    for (const StepSpec& of : stage_specs(pipeline, 4, {})) {
        const Step step = build_training_step(of);
        const auto first = find(step, [](const Action& action) { return action.kind != ActionKind::update; });
        EXPECT_EQ(count(step, ActionKind::update), static_cast<std::int64_t>(first));
    }
}

TEST(Step, UpdatesAlone) {
    for (const int zero : {0, 1, 3}) {
        const Step step = build_update_step(whole_spec(layers, {.stage = zero, .shards = 4}, micro_batches));
        check_step(step);
        EXPECT_EQ(count(step, ActionKind::update), layers + 3);
        EXPECT_EQ(count(step, ActionKind::gather_parameters), zero == 1 ? layers + 3 : 0);
        EXPECT_EQ(std::ssize(step.actions), zero == 1 ? 2 * (layers + 3) : layers + 3);
    }
}

// ---- optimizer state on disk

StepSpec spec_with_state_on_disk() {
    StepSpec of = whole_spec(layers, {.shards = 4, .offload = {.state = Tier::disk}}, micro_batches);
    of.state_pieces.assign(static_cast<std::size_t>(of.part.outline->units_count()), 3);
    return of;
}

TEST(StateOnDisk, EachPieceIsReadUpdatedAndWritten) {
    const Step step = build_training_step(spec_with_state_on_disk());
    check_step(step);
    const auto count = [&](ActionKind kind) { return std::ranges::count(step.actions, kind, &Action::kind); };
    const auto pieces = 3 * step.part.outline->units_count();
    EXPECT_EQ(count(ActionKind::read_state), pieces);
    EXPECT_EQ(count(ActionKind::update), pieces);
    EXPECT_EQ(count(ActionKind::write_state), pieces);
    // The piece after next is read while one is updated.
    const auto places_of = [&](ActionKind kind) {
        std::vector<std::ptrdiff_t> places;
        for (std::ptrdiff_t i = 0; i < std::ssize(step.actions); ++i)
            if (step.actions[static_cast<std::size_t>(i)].kind == kind) places.push_back(i);
        return places;
    };
    const auto reads = places_of(ActionKind::read_state), updates = places_of(ActionKind::update);
    for (std::size_t i = 0; i + 2 < reads.size(); ++i) {
        const std::vector<int>& after = step.actions[static_cast<std::size_t>(reads[i + 2])].after;
        EXPECT_TRUE(i == 0 || std::ranges::find(after, updates[i]) == after.end()) << i;
    }
}

TEST(StateOnDisk, FindsFaults) {
    Step good = build_training_step(spec_with_state_on_disk());
    const auto without = [&](ActionKind kind) {
        Step faulty = good;
        faulty.actions.erase(std::ranges::find(faulty.actions, kind, &Action::kind));
        return faulty;
    };
    expect_found(without(ActionKind::read_state), "lacks its piece of state");
    expect_found(without(ActionKind::write_state), "reads over a piece of state that the disk lacks");
    expect_found(without(ActionKind::update), "writes a piece of state before its update");
    const auto last =
        std::ranges::find(good.actions.rbegin(), good.actions.rend(), ActionKind::write_state, &Action::kind);
    good.actions.erase(std::next(last).base());
    expect_found(good, "the disk lacks a piece of state");
}

// ---- parameters on disk

StepSpec spec_with_parameters_on_disk(int stage) {
    return whole_spec(
        layers, {.stage = stage, .shards = 4, .prefetch_units = 1, .offload = {.parameters = Tier::disk}},
        micro_batches);
}

// Only layers have parameters on disk. A step writes them once, after their update, which comes after they are read and
// before anything else uses them.
TEST(ParametersOnDisk, AreReadUpdatedAndWritten) {
    for (const int zero : {0, 1, 2, 3}) {
        const Step step = build_training_step(spec_with_parameters_on_disk(zero));
        check_step(step);
        EXPECT_EQ(count(step, ActionKind::write_parameters), layers);
        EXPECT_GE(count(step, ActionKind::read_parameters), layers);
        std::set<int> places;
        for (int block = 0; block < layers; ++block) {
            std::vector<ActionKind> kinds;
            for (const Action& action : step.actions) {
                if (action.unit != block_unit(block)) continue;
                kinds.push_back(action.kind);
                if (action.kind == ActionKind::read_parameters) places.insert(action.writes.front().index);
            }
            std::vector<ActionKind> expected = {ActionKind::read_parameters, ActionKind::update,
                                                ActionKind::write_parameters};
            if (zero == 1 || zero == 2) expected.insert(expected.end() - 1, ActionKind::gather_parameters);
            if (zero == 3) expected.push_back(ActionKind::gather_parameters);
            kinds.resize(expected.size());
            EXPECT_EQ(kinds, expected) << "stage " << zero;
        }
        EXPECT_EQ(places.size(), 2) << "prefetch_units + 1";
    }
}

TEST(ParametersOnDisk, FindsFaults) {
    for (const int zero : {0, 3}) {
        const Step good = build_training_step(spec_with_parameters_on_disk(zero));
        const auto without = [&](ActionKind kind) {
            Step faulty = good;
            erase_first(faulty.actions, kind);
            return faulty;
        };
        expect_found(without(ActionKind::read_parameters),
                     zero == 3 ? "still on the disk" : "reads parameters that are not gathered");
        expect_found(without(ActionKind::write_parameters), "the disk lacks");
        Step early = good;
        const auto write = std::ranges::find(early.actions, ActionKind::write_parameters, &Action::kind);
        std::iter_swap(write, write - 1);
        expect_found(std::move(early), "before their update");
    }
}

// ---- a device with memory of its own

// Parameters that the host updates come to the device before their use; gradients go to the host before another layer
// takes their buffer.
TEST(OwnMemory, FindsFaults) {
    for (const Tier parameters : {Tier::device, Tier::host}) {
        for (const int zero : {0, 1, 3}) {
            const bool rotates = zero == 3;
            const Step good = build_training_step(whole_spec(layers,
                                                             {.stage = zero,
                                                              .shards = 4,
                                                              .reduces_each_micro_batch = rotates,
                                                              .prefetch_units = 2,
                                                              .offload = {Tier::host, parameters, true}},
                                                             micro_batches));
            const auto without = [&](ActionKind kind) {
                Step faulty = good;
                erase_first(faulty.actions, kind);
                return faulty;
            };
            // Otherwise the first copy only takes the buffer, for a share that the host updates.
            const bool is_update = parameters == Tier::device || zero != 1;
            if (is_update) {
                expect_found(without(ActionKind::upload_parameters), "that the host has updated");
                Step late = good;
                std::iter_swap(std::ranges::find(late.actions, ActionKind::update, &Action::kind),
                               std::ranges::find(late.actions, ActionKind::upload_parameters, &Action::kind));
                expect_found(std::move(late), "");
            }
            expect_found(without(ActionKind::download_gradients),
                         rotates ? "overwrites the shard of earlier micro-batches" : "without gradients");
            expect_found(without(ActionKind::update), "never updated");
            if (rotates) {
                expect_found(without(ActionKind::upload_gradients),
                             "reads a shard of gradients that nobody reduced");
                expect_found(without(ActionKind::square), "lacks the gradients of a unit");
            }
        }
    }
}

}  // namespace
}  // namespace llmc
