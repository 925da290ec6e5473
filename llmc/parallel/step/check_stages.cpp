// Follows the lists of all pipeline stages together. It stops with an error if a stage receives something
// other than what was sent to it, or if stages deadlock (step.h).
//
// A stage computes in the order of its list. It begins its communication in that order too, each action when
// those on which it depends are done. A transfer is done when both ends have begun it. Ranks of one stage
// have the same list, so communication among them never waits here.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/parallel/step/step.h"

namespace llmc {

namespace {

bool sends(ActionKind kind) {
    return kind == ActionKind::send_activation || kind == ActionKind::send_gradient;
}

// Whether an action is a collective over several stages.
bool meets(const Action& action) {
    return action.kind == ActionKind::reduce_loss || action.kind == ActionKind::gather_squares ||
           action.kind == ActionKind::sum_tied || action.kind == ActionKind::reduce_amax;
}

// One end of a transfer from one stage to another.
struct End {
    std::size_t action;
    int chunk, micro_batch;  // the receiver's chunk and micro-batch
};
// Transfers of one kind from one stage to another, in order: those that the sender has begun, and those that
// the receiver has begun.
struct Route {
    std::deque<End> sent, awaited;
};

class Stages {
  public:
    explicit Stages(std::span<const Step> steps) : steps_(steps), routes_(2 * steps.size()) {
        for (const Step& step : steps) places_.push_back({.done = std::vector<bool>(step.actions.size())});
    }

    void run() {
        bool moved = true;
        while (moved) {
            moved = false;
            for (std::size_t stage = 0; stage < steps_.size(); ++stage) {
                while (compute(stage) || communicate(stage)) moved = true;
            }
            if (meet()) moved = true;
        }
        for (std::size_t stage = 0; stage < steps_.size(); ++stage) require_end(stage);
    }

  private:
    // How far a stage is: its next action to compute, and its next one to communicate.
    struct Progress {
        std::size_t computed = 0, communicated = 0;
        std::vector<bool> done{};
    };

    const std::vector<Action>& actions(std::size_t stage) const { return steps_[stage].actions; }

    bool may_begin(std::size_t stage, std::size_t action) const {
        return std::ranges::all_of(actions(stage)[action].after, [&](int after) {
            return places_[stage].done[static_cast<std::size_t>(after)];
        });
    }

    // The next action of the compute stream, or of the other streams.
    std::size_t next(std::size_t stage, std::size_t from, bool computes) const {
        while (from < actions(stage).size() &&
               (actions(stage)[from].stream == StreamKind::compute) != computes)
            ++from;
        return from;
    }

    bool compute(std::size_t stage) {
        Progress& place = places_[stage];
        place.computed = next(stage, place.computed, true);
        if (place.computed == actions(stage).size() || !may_begin(stage, place.computed)) return false;
        place.done[place.computed++] = true;
        return true;
    }

    bool communicate(std::size_t stage) {
        Progress& place = places_[stage];
        place.communicated = next(stage, place.communicated, false);
        const std::size_t i = place.communicated;
        if (i == actions(stage).size() || !may_begin(stage, i) || meets(actions(stage)[i])) return false;
        if (is_between_stages(actions(stage)[i].kind)) {
            begin_transfer(stage, i);
        } else {
            place.done[i] = true;
        }
        ++place.communicated;
        return true;
    }

    void begin_transfer(std::size_t stage, std::size_t i) {
        const Action& action = actions(stage)[i];
        const int chunk = steps_[stage].chunk_of(action).number;
        const bool forward =
            action.kind == ActionKind::send_activation || action.kind == ActionKind::receive_activation;
        const std::size_t count = steps_.size();
        // A stage sends activations to the next stage, and gradients to the one before.
        const std::size_t sender = sends(action.kind) ? stage : (stage + (forward ? count - 1 : 1)) % count;
        const std::size_t receiver = sends(action.kind) ? (stage + (forward ? 1 : count - 1)) % count : stage;
        Route& route = routes_[2 * sender + (forward ? 0 : 1)];
        const int goal = sends(action.kind) ? chunk + (forward ? 1 : -1) : chunk;
        (sends(action.kind) ? route.sent : route.awaited).push_back({i, goal, action.micro_batch});
        if (route.sent.empty() || route.awaited.empty()) return;
        const End from = route.sent.front(), to = route.awaited.front();
        if (from.chunk != to.chunk || from.micro_batch != to.micro_batch) {
            programming_error(fmt::format(
                "step: stage {} sends what chunk {} needs of micro-batch {}, and stage {} receives it for "
                "chunk {} and micro-batch {}",
                sender, from.chunk, from.micro_batch, receiver, to.chunk, to.micro_batch));
        }
        places_[sender].done[from.action] = places_[receiver].done[to.action] = true;
        route.sent.pop_front();
        route.awaited.pop_front();
    }

    // Performs an action of several stages when all that take part have reached it.
    bool meet() {
        const auto waiting = [&](std::size_t stage) -> const Action* {
            const Progress& place = places_[stage];
            const bool ended = place.communicated == actions(stage).size();
            return ended || !may_begin(stage, place.communicated) ? nullptr
                                                                  : &actions(stage)[place.communicated];
        };
        for (std::size_t first = 0; first < steps_.size(); ++first) {
            const Action* met = waiting(first);
            if (met == nullptr || !meets(*met)) continue;
            std::vector<std::size_t> taking_part;
            for (std::size_t stage = 0; stage < steps_.size(); ++stage) {
                if (met->kind != ActionKind::sum_tied || steps_[stage].part.has_unit(met->unit))
                    taking_part.push_back(stage);
            }
            const bool all_there = std::ranges::all_of(taking_part, [&](std::size_t stage) {
                const Action* action = waiting(stage);
                return action != nullptr && action->kind == met->kind && action->unit == met->unit;
            });
            if (!all_there) continue;
            for (const std::size_t stage : taking_part)
                places_[stage].done[places_[stage].communicated++] = true;
            return true;
        }
        return false;
    }

    void require_end(std::size_t stage) const {
        const auto undone = std::ranges::find(places_[stage].done, false);
        if (undone == places_[stage].done.end()) return;
        const auto i = static_cast<std::size_t>(undone - places_[stage].done.begin());
        const Action& action = actions(stage)[i];
        programming_error(fmt::format("step: stage {} waits for ever at action {} ({}, micro-batch {})",
                                      stage, i, name_of(action.kind), action.micro_batch));
    }

    std::span<const Step> steps_;
    std::vector<Progress> places_;
    std::vector<Route> routes_;  // by the sender: activations, gradients
};

}  // namespace

void check_stages(std::span<const Step> stages) { Stages(stages).run(); }

}  // namespace llmc
