#include "llmc/parallel/step.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "llmc/parallel/step_places.h"

namespace llmc {

namespace {

// The last actions of each stream that wrote and used a buffer, by their place in the list.
struct LastUses {
    LastUses() {
        write.fill(-1);
        use.fill(-1);
    }
    std::array<int, all_streams.size()> write, use;
};

}  // namespace

std::vector<std::vector<int>> dependencies(const Step& step) {
    std::vector<std::vector<int>> after(step.actions.size());
    if (!communicates(step)) return after;  // one stream waits for nothing
    std::map<Place, LastUses> buffers;
    std::vector<LastUses*> read, written;
    for (int i = 0; i < std::ssize(step.actions); ++i) {
        const Action& action = step.actions[static_cast<std::size_t>(i)];
        const auto own = static_cast<std::size_t>(action.stream);
        const auto find_all = [&](std::vector<LastUses*>& found, const std::vector<BufferUse>& uses) {
            found.clear();
            for (const BufferUse& use : uses) found.push_back(&buffers[place_of(action, use)]);
        };
        find_all(read, action.reads);
        find_all(written, action.writes);
        for (std::size_t other = 0; other < all_streams.size(); ++other) {
            if (other == own) continue;
            int last = -1;
            for (const LastUses* buffer : read) last = std::max(last, buffer->write[other]);
            for (const LastUses* buffer : written) last = std::max(last, buffer->use[other]);
            if (last >= 0) after[static_cast<std::size_t>(i)].push_back(last);
        }
        for (LastUses* buffer : read) buffer->use[own] = i;
        for (LastUses* buffer : written) buffer->use[own] = buffer->write[own] = i;
    }
    return after;
}

void order_streams(Step& step) {
    std::vector<std::vector<int>> after = dependencies(step);
    for (std::size_t i = 0; i < after.size(); ++i) step.actions[i].after = std::move(after[i]);
}

BuffersInFlight buffers_in_flight(const Step& step) {
    BuffersInFlight count;
    const auto at_least = [](int& number, int index) { number = std::max(number, index + 1); };
    std::map<int, int> first_parts;   // of slots
    std::map<int, std::size_t> last;  // the last action that needs the tokens of a micro-batch
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        at_least(count.slots, action.slot);
        if (action.kind == ActionKind::backward || action.kind == ActionKind::backward_input)
            first_parts[action.slot] = step.chunk_of(action).first_with_input();
        for (const auto* uses : {&action.reads, &action.writes}) {
            for (const BufferUse& use : *uses) {
                if (use.role == BufferRole::chunk_input) at_least(count.chunk_inputs, use.index);
                if (use.role == BufferRole::residual_gradient || use.role == BufferRole::rows)
                    at_least(count.residual_gradients, use.index);
                if (use.role == BufferRole::output_gradients) at_least(count.output_gradients, use.index);
                if (use.role == BufferRole::tokens) last[action.micro_batch] = i;
            }
        }
    }
    for (const auto& [slot, part] : first_parts) count.first_parts.push_back(part);
    int alive = 0;
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        if (action.kind == ActionKind::load) count.tokens = std::max(count.tokens, ++alive);
        if (const auto found = last.find(action.micro_batch); found != last.end() && found->second == i)
            --alive;
    }
    return count;
}

bool communicates(const Step& step) {
    return std::ranges::any_of(step.actions,
                               [](const Action& action) { return action.stream != StreamKind::compute; });
}

bool is_between_stages(ActionKind kind) {
    return kind == ActionKind::receive_activation || kind == ActionKind::send_activation ||
           kind == ActionKind::receive_gradient || kind == ActionKind::send_gradient;
}

}  // namespace llmc
