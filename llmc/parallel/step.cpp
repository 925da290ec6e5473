#include "llmc/parallel/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/model/units.h"

namespace llmc {

std::string_view name_of(ActionKind kind) {
    switch (kind) {
        case ActionKind::load:
            return "load";
        case ActionKind::zero:
            return "zero";
        case ActionKind::forward:
            return "forward";
        case ActionKind::backward:
            return "backward";
        case ActionKind::round:
            return "round";
        case ActionKind::accumulate:
            return "accumulate";
        case ActionKind::reduce_scatter:
            return "reduce_scatter";
        case ActionKind::all_gather:
            return "all_gather";
        case ActionKind::reduce_loss:
            return "reduce_loss";
        case ActionKind::square:
            return "square";
        case ActionKind::gather_squares:
            return "gather_squares";
        case ActionKind::norm:
            return "norm";
        case ActionKind::update:
            return "update";
    }
    return "?";
}

int gradient_sums_of(int unit, int layers) {
    const bool block = unit >= block_unit(0) && unit < block_unit(layers);
    return block ? block_unit(0) : unit;
}

std::string to_string(const Part& part) {
    switch (part.kind) {
        case PartKind::embedding:
            return "embedding";
        case PartKind::block:
            return fmt::format("block {}", part.block);
        case PartKind::head:
            return "head";
    }
    return "?";
}

namespace {

std::string_view name_of(BufferRole role) {
    switch (role) {
        case BufferRole::parameters:
            return "parameters";
        case BufferRole::gradients:
            return "gradients";
        case BufferRole::gradient_sums:
            return "sums";
        case BufferRole::optimizer:
            return "optimizer";
        case BufferRole::tokens:
            return "tokens";
        case BufferRole::residual:
            return "residual";
        case BufferRole::saved:
            return "saved";
        case BufferRole::residual_gradient:
            return "dresidual";
        case BufferRole::loss:
            return "loss";
        case BufferRole::squares:
            return "squares";
        case BufferRole::norm:
            return "norm";
    }
    return "?";
}

bool belongs_to_unit(BufferRole role) {
    return role == BufferRole::parameters || role == BufferRole::gradients ||
           role == BufferRole::gradient_sums || role == BufferRole::optimizer;
}

bool belongs_to_micro_batch(BufferRole role) {
    return role == BufferRole::tokens || role == BufferRole::residual || role == BufferRole::saved ||
           role == BufferRole::residual_gradient;
}

// "h.0, wte" for all uses of one role, roles in order of appearance.
std::string to_string(std::span<const BufferUse> uses, std::span<const std::string> unit_names) {
    std::string text;
    for (std::size_t i = 0; i < uses.size(); ++i) {
        const BufferUse& use = uses[i];
        if (i > 0) text += ", ";
        text += name_of(use.role);
        if (belongs_to_unit(use.role)) text += " " + unit_names[static_cast<std::size_t>(use.index)];
        if (use.role == BufferRole::residual || use.role == BufferRole::saved)
            text += fmt::format(" {}", use.index);
    }
    return text;
}

std::string describe(const Action& action, std::size_t position) {
    return fmt::format("action {} ({}, micro-batch {}, unit {}, {})", position, name_of(action.kind),
                       action.micro_batch, action.unit, to_string(action.part));
}

// The last actions of each stream that wrote and used a buffer, by their place in the list.
struct LastUses {
    std::array<int, 2> write = {-1, -1};
    std::array<int, 2> use = {-1, -1};
};

// For each action, the last earlier one of the other stream that it must wait for, or -1.
std::vector<int> dependencies(const Step& step) {
    using Place = std::pair<std::pair<BufferRole, int>, int>;  // role and index, slot
    std::map<Place, LastUses> buffers;
    std::vector<int> after;
    for (int i = 0; i < std::ssize(step.actions); ++i) {
        const Action& action = step.actions[static_cast<std::size_t>(i)];
        const auto own = static_cast<std::size_t>(action.stream), other = 1 - own;
        const auto last_uses = [&](const BufferUse& use) -> LastUses& {
            return buffers[{{use.role, use.index}, belongs_to_micro_batch(use.role) ? action.slot : 0}];
        };
        int last = -1;
        for (const BufferUse& use : action.reads) last = std::max(last, last_uses(use).write[other]);
        for (const BufferUse& use : action.writes) last = std::max(last, last_uses(use).use[other]);
        for (const BufferUse& use : action.reads) last_uses(use).use[own] = i;
        for (const BufferUse& use : action.writes) last_uses(use).use[own] = last_uses(use).write[own] = i;
        after.push_back(last);
    }
    return after;
}

// Follows a list from action to action; see check_step.
class Checker {
  public:
    void visit(const Action& action, std::size_t position) {
        where_ = describe(action, position);
        for (const BufferUse& use : action.reads) read(action, use);
        for (const BufferUse& use : action.writes) write(action, use);
        if (action.kind == ActionKind::norm) norm_done_ = true;
        if (action.kind == ActionKind::update) {
            require(norm_done_, "updates before the norm");
            require(updated_.insert(action.unit).second, "updates its unit a second time");
        }
    }

    void finish(bool training) const {
        for (const auto& [unit, state] : gradients_) {
            if (training && !updated_.contains(unit)) {
                programming_error(fmt::format("step: unit {} is never updated", unit));
            }
        }
        for (const auto& [_, sums] : sums_) {
            if (sums.state == Sums::filled) {
                programming_error(
                    fmt::format("step: gradient sums of unit {} never reach its gradients", sums.unit));
            }
        }
    }

  private:
    enum class Gradient { accumulating, scattered, complete };
    // Of the unit that uses the buffer; `taken` is what the gradients have.
    struct Sums {
        int unit;
        enum { zeroed, filled, taken } state;
    };
    using Place = std::pair<std::pair<BufferRole, int>, int>;  // role and index, slot

    void require(bool condition, std::string_view fault) const {
        if (!condition) programming_error(fmt::format("step: {} {}", where_, fault));
    }

    void read(const Action& action, const BufferUse& use) {
        if (belongs_to_micro_batch(use.role)) {
            const auto found = owner_.find({{use.role, use.index}, action.slot});
            require(found != owner_.end(), "reads an activation that nobody wrote");
            require(found->second == action.micro_batch, "reads an activation of another micro-batch");
        }
        if (use.role == BufferRole::gradients) {
            const auto found = gradients_.find(use.index);
            require(found != gradients_.end(), "reads gradients that were never zeroed");
            if (action.kind == ActionKind::all_gather) {
                require(found->second == Gradient::scattered, "gathers gradients that are not scattered");
            }
            if (action.kind == ActionKind::update) {
                require(found->second != Gradient::scattered, "updates from gradients that are only a shard");
            }
        }
        if (use.role == BufferRole::gradient_sums) {
            const auto found = sums_.find(use.index);
            require(found != sums_.end() && found->second.unit == action.unit,
                    "takes gradient sums of another unit");
            require(found->second.state == Sums::filled, "takes gradient sums that nobody made");
            found->second.state = Sums::taken;
        }
        if (use.role == BufferRole::norm) require(norm_done_, "reads the norm before it is made");
    }

    void write(const Action& action, const BufferUse& use) {
        if (belongs_to_micro_batch(use.role))
            owner_[{{use.role, use.index}, action.slot}] = action.micro_batch;
        if (use.role == BufferRole::gradient_sums) write_sums(action, use.index);
        if (use.role != BufferRole::gradients) return;
        if (action.kind == ActionKind::round) {
            require(!gradients_.contains(use.index), "overwrites the gradients of earlier micro-batches");
        }
        if (action.kind == ActionKind::zero || action.kind == ActionKind::round) {
            gradients_[use.index] = Gradient::accumulating;
            return;
        }
        const auto found = gradients_.find(use.index);
        require(found != gradients_.end(), "writes gradients that were never zeroed");
        require(!norm_done_, "writes gradients after the norm");
        switch (action.kind) {
            case ActionKind::backward:
            case ActionKind::accumulate:
                require(found->second == Gradient::accumulating, "adds to gradients that were reduced");
                break;
            case ActionKind::reduce_scatter:
                found->second = Gradient::scattered;
                break;
            case ActionKind::all_gather:
                found->second = Gradient::complete;
                break;
            default:
                require(false, "has no business with gradients");
        }
    }

    void write_sums(const Action& action, int index) {
        const auto found = sums_.find(index);
        if (action.kind == ActionKind::zero) {
            require(found == sums_.end() || found->second.state != Sums::filled,
                    "zeroes gradient sums that the gradients lack");
            sums_[index] = {action.unit, Sums::zeroed};
            return;
        }
        require(found != sums_.end() && found->second.state != Sums::taken,
                "adds to gradient sums that are not zeroed");
        const bool of_block = action.part.kind == PartKind::block;
        require(found->second.unit == (of_block ? block_unit(action.part.block) : index),
                "adds to gradient sums of another unit");
        found->second.state = Sums::filled;
    }

    std::string where_;
    std::map<Place, int> owner_;  // the micro-batch that wrote it last
    std::map<int, Sums> sums_;
    std::map<int, Gradient> gradients_;
    std::set<int> updated_;
    bool norm_done_ = false;
};

}  // namespace

void order_streams(Step& step) {
    const std::vector<int> after = dependencies(step);
    for (std::size_t i = 0; i < after.size(); ++i) step.actions[i].after = after[i];
}

void check_step(const Step& step) {
    Checker checker;
    for (std::size_t i = 0; i < step.actions.size(); ++i) checker.visit(step.actions[i], i);
    checker.finish(true);

    const std::vector<int> needed = dependencies(step);
    for (std::size_t i = 0; i < needed.size(); ++i) {
        const Action& action = step.actions[i];
        if (action.after < needed[i]) {
            programming_error(fmt::format("step: {} may run before action {}, on which it depends",
                                          describe(action, i), needed[i]));
        }
        if (action.after >= static_cast<int>(i)) {
            programming_error(fmt::format("step: {} waits for a later action", describe(action, i)));
        }
    }
}

int slots_in_flight(const Step& step) {
    // A micro-batch lives from its load to the last action that names it.
    std::map<int, std::size_t> last;
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        if (step.actions[i].micro_batch >= 0) last[step.actions[i].micro_batch] = i;
    }
    int alive = 0, most = 0;
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        if (action.micro_batch < 0) continue;
        if (action.kind == ActionKind::load) most = std::max(most, ++alive);
        if (last[action.micro_batch] == i) --alive;
    }
    return most;
}

std::uint64_t gradient_bytes_sent(const Step& step, std::span<const std::uint64_t> gradient_bytes) {
    const auto n = static_cast<std::uint64_t>(step.data_ranks);
    std::uint64_t bytes = 0;
    for (const Action& action : step.actions) {
        if (action.kind == ActionKind::reduce_scatter || action.kind == ActionKind::all_gather) {
            bytes += gradient_bytes[static_cast<std::size_t>(action.unit)] / n * (n - 1);
        }
    }
    return bytes;
}

std::string to_string(const Step& step, std::span<const std::string> unit_names) {
    std::string text =
        fmt::format("one step of this rank: {} actions, {} micro-batch{}, {} data rank{}\n\n",
                    step.actions.size(), step.micro_batches, step.micro_batches == 1 ? "" : "es",
                    step.data_ranks, step.data_ranks == 1 ? "" : "s");
    text += fmt::format("{:>5}  {:>5}  {:<14} {:<14} {:<10} {:>5}  {}\n", "#", "after", "stream", "action",
                        "on", "micro", "reads -> writes");
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        const bool of_part = action.kind == ActionKind::forward || action.kind == ActionKind::backward;
        const std::string on = of_part            ? to_string(action.part)
                               : action.unit >= 0 ? unit_names[static_cast<std::size_t>(action.unit)]
                                                  : "";
        const std::string micro = action.micro_batch >= 0 ? std::to_string(action.micro_batch) : "";
        const std::string after = action.after >= 0 ? std::to_string(action.after) : "";
        text += fmt::format("{:>5}  {:>5}  {:<14} {:<14} {:<10} {:>5}  {}{}{}\n", i, after,
                            name_of(action.stream), name_of(action.kind), on, micro,
                            to_string(action.reads, unit_names), action.reads.empty() ? "-> " : " -> ",
                            to_string(action.writes, unit_names));
    }
    return text;
}

}  // namespace llmc
