// The two threads that perform a step's list: when and where each action is performed, and how faults are
// handled.
#include "llmc/parallel/step/host_streams.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "test/unit/step_specs.h"

namespace llmc {
namespace {

Action action(StreamKind stream, std::vector<BufferUse> reads, std::vector<BufferUse> writes) {
    return {.kind = stream == StreamKind::compute ? ActionKind::backward : ActionKind::reduce_scatter,
            .stream = stream,
            .reads = std::move(reads),
            .writes = std::move(writes)};
}

constexpr BufferUse gradients(int unit) { return {BufferRole::gradients, unit}; }

// For each unit, a backward action and the reduction of its gradients. Then one action that reads all
// gradients.
Step backward_and_reductions(int units) {
    Step step;
    Action last = action(StreamKind::compute, {}, {{BufferRole::norm}});
    for (int unit = 0; unit < units; ++unit) {
        step.actions.push_back(action(StreamKind::compute, {}, {gradients(unit)}));
        step.actions.push_back(action(StreamKind::communication, {gradients(unit)}, {gradients(unit)}));
        last.reads.push_back(gradients(unit));
    }
    step.actions.push_back(last);
    order_streams(step);
    return step;
}

std::size_t place_of(const Step& step, const Action& performed) {
    return static_cast<std::size_t>(&performed - step.actions.data());
}

// Performs the list with pauses that make one of the streams slower, and checks every wait.
void expect_order(bool overlap, bool slow_communication) {
    const Step step = backward_and_reductions(6);
    std::vector<std::atomic<bool>> done(step.actions.size());
    std::vector<std::size_t> order;
    std::mutex mutex;
    const auto caller = std::this_thread::get_id();
    HostStreams streams(overlap);
    for (int round = 0; round < 20; ++round) {
        for (auto& flag : done) flag = false;
        order.clear();
        run_with(streams, step, [&](const Action& performed) {
            const std::size_t place = place_of(step, performed);
            const bool communicates = performed.stream == StreamKind::communication;
            EXPECT_EQ(std::this_thread::get_id() == caller, !overlap || !communicates);
            for (const int after : performed.after) EXPECT_TRUE(done[static_cast<std::size_t>(after)]);
            if (communicates == slow_communication)
                std::this_thread::sleep_for(std::chrono::microseconds(200));
            done[place] = true;
            const std::lock_guard lock(mutex);
            order.push_back(place);
        });
        EXPECT_EQ(order.size(), step.actions.size());
        EXPECT_EQ(order.back(), step.actions.size() - 1);
        EXPECT_TRUE(overlap || std::ranges::is_sorted(order));
    }
}

TEST(HostStreams, WaitForSlowCommunication) { expect_order(true, true); }
TEST(HostStreams, WaitForSlowComputing) { expect_order(true, false); }
TEST(HostStreams, WithoutOverlapTheCallerFollowsTheList) { expect_order(false, true); }

// Only a second thread can end this: the reduction waits for a computation that is later in the list.
TEST(HostStreams, ComputingGoesOnBesideCommunication) {
    const Step step = backward_and_reductions(2);
    std::atomic<bool> second_backward{false};
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    HostStreams streams(true);
    run_with(streams, step, [&](const Action& performed) {
        if (place_of(step, performed) == 2) second_backward = true;
        if (place_of(step, performed) != 1) return;
        while (!second_backward && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    });
    EXPECT_TRUE(second_backward);
}

TEST(HostStreams, TimeIsTheCallersByPhase) {
    const Step step = backward_and_reductions(2);
    const auto sleep = [](const Action&) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
    const auto times = [&](bool overlap) {
        HostStreams streams(overlap);
        run_with(streams, step, sleep);
        return streams.times();
    };
    const PhaseTimes alone = times(false), beside = times(true);
    EXPECT_GE(alone[Phase::backward], 3 * 5.0);
    EXPECT_GE(alone[Phase::communication], 2 * 5.0);
    EXPECT_GE(beside[Phase::backward], 3 * 5.0);
    EXPECT_GE(beside[Phase::communication], 5.0);  // nothing can be computed during the last reduction
    EXPECT_EQ(beside[Phase::update], 0.0);
}

TEST(HostStreams, EveryActionIsTimedWhereThatIsAskedFor) {
    const Step step = backward_and_reductions(3);
    const auto sleep = [](const Action&) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
    const auto now = [] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
    for (const bool overlap : {true, false}) {
        HostStreams streams(overlap);
        run_with(streams, step, sleep);
        EXPECT_TRUE(streams.action_times().empty());
        streams.watch_actions(true);
        const double before = now();
        run_with(streams, step, sleep);
        const double behind = now();
        const auto times = streams.action_times();
        ASSERT_EQ(times.size(), step.actions.size());
        for (std::size_t place = 0; place < times.size(); ++place) {
            EXPECT_GE(times[place].begin, before);
            EXPECT_GE(times[place].end - times[place].begin, 2e-3);
            EXPECT_LE(times[place].end, behind);
            for (const int after : step.actions[place].after)
                EXPECT_LE(times[static_cast<std::size_t>(after)].end, times[place].begin);
        }
    }
}

// A transfer between stages ends when it is seen to be done, not when it starts.
TEST(HostStreams, ATransferEndsWhenItIsDone) {
    const auto slow = [](const Action&) {
        const auto begun = std::chrono::steady_clock::now();
        return [begun] { return std::chrono::steady_clock::now() - begun > std::chrono::milliseconds(5); };
    };
    Step step;
    step.actions.push_back({.kind = ActionKind::receive_activation,
                            .stream = StreamKind::activations_in,
                            .reads = {},
                            .writes = {{BufferRole::chunk_input}}});
    order_streams(step);
    for (const bool overlap : {true, false}) {
        HostStreams streams(overlap);
        streams.watch_actions(true);
        run_on(streams, step, slow);
        EXPECT_GE(streams.action_times()[0].end - streams.action_times()[0].begin, 5e-3);
    }
}

// A fault in either stream reaches the caller. The next list then runs normally.
TEST(HostStreams, FaultsReachTheCallerAndTheNextListRuns) {
    const Step step = backward_and_reductions(3);
    for (const bool overlap : {true, false}) {
        HostStreams streams(overlap);
        for (std::size_t faulty = 0; faulty < step.actions.size(); ++faulty) {
            try {
                run_with(streams, step, [&](const Action& performed) {
                    if (place_of(step, performed) == faulty) throw std::runtime_error(std::to_string(faulty));
                });
                ADD_FAILURE() << "the fault of action " << faulty << " is lost";
            } catch (const std::runtime_error& fault) {
                EXPECT_EQ(fault.what(), std::to_string(faulty));
            }
            std::atomic<int> performed{0};
            run_with(streams, step, [&](const Action&) { ++performed; });
            EXPECT_EQ(performed, static_cast<int>(step.actions.size()));
        }
    }
}

}  // namespace
}  // namespace llmc
