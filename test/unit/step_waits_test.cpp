// The waits between the streams of a list. Reads and writes, compared here pair by pair, demand exactly these
// waits. So sends and receives overlap with computation.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bitset>
#include <compare>
#include <map>
#include <vector>

#include "llmc/parallel/step/build_step.h"
#include "llmc/parallel/step/step.h"
#include "test/unit/step_specs.h"

namespace llmc {
namespace {

using enum ActionKind;
using Buffers = std::bitset<1024>;

struct Uses {
    Buffers reads, writes, all;

    // Whether the two must keep their order.
    bool meets(const Uses& other) const { return (all & other.writes).any() || (writes & other.all).any(); }
};

std::vector<Uses> uses_of(const Step& step) {
    struct Memory {
        BufferRole role;
        int index, slot;
        Tier tier;
        auto operator<=>(const Memory&) const = default;
    };
    std::map<Memory, std::size_t> numbers;
    const auto number_of = [&](const Action& action, const BufferUse& use) {
        const bool is_in_slot = use.role == BufferRole::tokens || use.role == BufferRole::residual ||
                                use.role == BufferRole::saved;
        const Memory memory{use.role, use.index, is_in_slot ? action.slot : 0, use.tier};
        return numbers.emplace(memory, numbers.size()).first->second;
    };
    std::vector<Uses> all;
    for (const Action& action : step.actions) {
        Uses& uses = all.emplace_back();
        for (const BufferUse& use : action.reads) uses.reads.set(number_of(action, use));
        for (const BufferUse& use : action.writes) uses.writes.set(number_of(action, use));
        uses.all = uses.reads | uses.writes;
    }
    return all;
}

// For each other stream, the last earlier action that conflicts with an action.
std::vector<int> needed_by(const Step& step, const std::vector<Uses>& uses, std::size_t place) {
    std::vector<int> needed(all_streams.size(), -1);
    auto open = static_cast<std::ptrdiff_t>(all_streams.size()) - 1;  // streams without such an action so far
    for (std::size_t earlier = place; open > 0 && earlier-- > 0;) {
        const StreamKind stream = step.actions[earlier].stream;
        int& of_stream = needed[static_cast<std::size_t>(stream)];
        if (stream == step.actions[place].stream || of_stream >= 0 || !uses[place].meets(uses[earlier]))
            continue;
        of_stream = static_cast<int>(earlier);
        --open;
    }
    std::erase(needed, -1);
    return needed;
}

bool is_send(const Action& action) { return action.kind == send_activation || action.kind == send_gradient; }

// Calls f with the training lists of all stages, until the first fault.
template <class F>
void for_all_lists(F&& f) {
    for_all_pipelines([&](const PipelineSpec& pipeline) {
        const int layers = pipeline.chunks() + pipeline.chunks() / 2;
        for_all_settings([&](const StepSpec& spec) {
            for (const StepSpec& of : stage_specs(pipeline, layers, spec)) {
                if (testing::Test::HasFailure()) return;
                SCOPED_TRACE(fmt::format("stage {}, ZeRO-{}, rounds {}, recompute {}", of.stage,
                                         of.sharding.stage, of.rounds_gradients, name_of(of.recompute.kind)));
                f(build_training_step(of), of);
            }
        });
    });
}

TEST(StepWaits, AreThoseOfReadsAndWritesAndNoMore) {
    for_all_lists([](const Step& step, const StepSpec&) {
        if (!has_streams(step)) {
            for (const Action& action : step.actions) ASSERT_TRUE(action.after.empty());
            return;
        }
        const std::vector<Uses> uses = uses_of(step);
        for (std::size_t place = 0; place < uses.size(); ++place)
            ASSERT_EQ(step.actions[place].after, needed_by(step, uses, place)) << "action " << place;
    });
}

// A send only reads its buffer, and a receive only writes it. Computation waits for a send before it
// overwrites the buffer. A receive waits for the last use of its buffer. At least one more pass lies between
// a send and the first action that waits for it, except with one micro-batch at a time.
TEST(StepWaits, SendsAndReceiptsRunBesideComputing) {
    int overlapped = 0;
    for_all_lists([&](const Step& step, const StepSpec& of) {
        const std::vector<Uses> uses = uses_of(step);
        for (std::size_t place = 0; place < uses.size(); ++place) {
            const Action& action = step.actions[place];
            if (!is_between_stages(action.kind)) continue;
            ASSERT_EQ(uses[place].reads.count(), is_send(action) ? 1U : 0U);
            ASSERT_EQ(uses[place].writes.count(), is_send(action) ? 0U : 1U);
            if (!is_send(action) || of.pipeline.schedule == PipelineSchedule::naive) continue;
            // The passes after it, up to the first that waits.
            std::vector<const Action*> passes;
            for (std::size_t later = place + 1; later < uses.size(); ++later) {
                const Action& next = step.actions[later];
                if (next.stream != StreamKind::compute || next.micro_batch < 0) continue;
                const bool is_forward = next.kind == forward;
                if (passes.empty() || passes.back()->micro_batch != next.micro_batch ||
                    passes.back()->chunk != next.chunk || (passes.back()->kind == forward) != is_forward)
                    passes.push_back(&next);
                if (!std::ranges::count(next.after, static_cast<int>(place))) continue;
                ASSERT_GT(passes.size(), 1U) << "action " << later << " waits for " << place;
                ++overlapped;
                break;
            }
        }
    });
    EXPECT_GT(overlapped, 1000);
}

}  // namespace
}  // namespace llmc
