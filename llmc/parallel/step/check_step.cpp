// Follows a list from action to action. It stops with an error at the first action that reads or overwrites a
// buffer that it must not (step.h).
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/parallel/step/step.h"

namespace llmc {

namespace {

std::string describe(const Step& step, std::size_t position) {
    const Action& action = step.actions[position];
    return fmt::format("action {} ({}, micro-batch {}, unit {}, {})", position, name_of(action.kind),
                       action.micro_batch, action.unit,
                       action.part < 0 ? "no part" : step.part.outline->part(action.part).name);
}

class Checker {
  public:
    explicit Checker(const Step& step)
        : step_(step), sharding_(step.sharding), offload_(step.sharding.offload), part_(step.part) {
        for (const auto& [unit, _] : part_.units) {
            if (offload_.parameters != Tier::disk || !are_parameters_offloaded(sharding_, unit, part_))
                host_parameters_[unit] = unit;
            if (are_parameters_offloaded(sharding_, unit, part_)) continue;
            if (sharding_.keeps_parameters_whole()) parameters_[unit] = unit;
            parameter_shards_[unit] = unit;
        }
        for (const Action& action : step.actions)
            if (action.kind == ActionKind::update) expect_update(action);
    }

    void visit(const Action& action, std::size_t position) {
        where_ = position;
        for (const BufferUse& use : action.reads) {
            require_own(action, use);
            read(action, use);
        }
        for (const BufferUse& use : action.writes) {
            require_own(action, use);
            write(action, use);
        }
        if (action.kind == ActionKind::recompute)
            require(std::ranges::find(action.reads, BufferRole::parameters, &BufferUse::role) !=
                        action.reads.end(),
                    "recomputes without parameters");
        if (action.kind == ActionKind::norm) take_norm();
        if (action.kind == ActionKind::update) update(action);
        visit_directions(action);
        if (moves_parameters(action.kind)) move_parameters(action);
        if (action.kind == ActionKind::download_gradients) give_gradients(action);
        visit_disk(action);
    }

    void finish() const {
        if (!held_.empty()) programming_error("step: the disk lacks a piece of state that was updated");
        for (const auto& [unit, tier] : stale_) {
            if (tier != Tier::device || !are_parameters_offloaded(sharding_, unit, part_))
                programming_error(
                    fmt::format("step: the {} lacks parameters that were updated", name_of(tier)));
        }
        if (!with_gradients_.empty() && !norm_done_) programming_error("step: the norm is never made");
        for (const int unit : with_gradients_) {
            if (!updated_.contains(unit))
                programming_error(fmt::format("step: unit {} is never updated", unit));
        }
        for (const auto& [_, sums] : sums_) {
            if (sums.state == Sums::filled)
                programming_error(
                    fmt::format("step: gradient sums of unit {} never reach its gradients", sums.unit));
        }
    }

  private:
    // Whole gradients in a buffer.
    struct Whole {
        int unit;
        enum {
            accumulating,  // The backward pass adds to them.
            scattered,     // The rank's own part has the sum over the group.
            handed_over,   // The sum is in a shard with its own buffer.
            complete       // All elements have the sum.
        } state;
    };
    // The directions in the only buffer for them.
    struct Directions {
        enum State { own, gathered, orthogonal };
        int unit = -1;
        State state = own;
        bool operator==(const Directions&) const = default;
    };
    // Gradient sums of one micro-batch; `taken`: they have been added to the gradients.
    struct Sums {
        int unit;
        enum { zeroed, filled, taken } state;
    };

    // A chunk, and a micro-batch.
    using Owner = std::pair<int, int>;
    Owner owner_of(const Action& action, const BufferUse& use) const {
        // On a single stage, a chunk passes these on to the next.
        const bool passes = use.role == BufferRole::chunk_input ||
                            use.role == BufferRole::residual_gradient || use.role == BufferRole::rows;
        const bool is_of_all = use.role == BufferRole::tokens || (passes && step_.stages == 1);
        return {is_of_all ? -1 : action.chunk, action.micro_batch};
    }

    void require(bool condition, std::string_view fault) const {
        if (!condition) programming_error(fmt::format("step: {} {}", describe(step_, where_), fault));
    }

    // The gradients of the step before, which an update takes.
    void expect_update(const Action& action) {
        pending_updates_[action.unit].insert(action.piece);
        for (const BufferUse& use : action.reads) {
            if (use.tier == Tier::host) {
                if (use.role == BufferRole::gradients) on_host_.insert(use.unit);
                continue;
            }
            if (use.role == BufferRole::gradients) gradients_[use.index] = {use.unit, Whole::complete};
            if (use.role == BufferRole::gradient_shard) shards_[use.index] = use.unit;
        }
    }

    void update(const Action& action) {
        // All other copies of the parameters are old now.
        const bool is_offloaded = are_parameters_offloaded(sharding_, action.unit, part_);
        const bool is_on_host = offload_.updates_on_host();
        if (is_on_host) stale_.insert({action.unit, Tier::device});
        if (is_offloaded && offload_.has_own_memory && !is_on_host) stale_.insert({action.unit, Tier::host});
        if (is_offloaded && offload_.parameters == Tier::disk) stale_.insert({action.unit, Tier::disk});
        const auto pending = pending_updates_.find(action.unit);
        require(pending != pending_updates_.end() && pending->second.erase(action.piece) == 1,
                "updates its unit a second time");
        if (!pending->second.empty()) return;
        pending_updates_.erase(action.unit);
        updated_.insert(action.unit);
        std::erase_if(shards_, [&](const auto& of) { return of.second == action.unit; });
        on_host_.erase(action.unit);
        std::erase_if(gradients_, [&](const auto& of) { return of.second.unit == action.unit; });
        // Other ranks have updated the rest.
        if (sharding_.keeps_parameters_whole() && !sharding_.keeps_optimizer_whole() && sharding_.ranks() > 1)
            ungathered_.insert(action.unit);
    }

    void take_norm() {
        norm_done_ = true;
        for (const int unit : with_gradients_)
            require(!part_.is_tied(unit) || tied_.contains(unit), "takes tied gradients of one stage");
        for (const int unit : with_gradients_) {
            require(!part_.counts_unit(unit) || squared_.contains(unit), "lacks the gradients of a unit");
            require(!offload_.updates_on_host() || on_host_.contains(unit),
                    "leaves the host without gradients that it updates with");
        }
        for (const auto& [_, of] : gradients_)
            require(!sharding_.keeps_optimizer_whole() || of.state != Whole::scattered,
                    "leaves an update gradients that are only a shard");
    }

    // Copies parameters: the copy is as new as the one that it is made from.
    void move_parameters(const Action& action) {
        const Tier from = action.reads.front().tier, to = action.writes.front().tier;
        require(!stale_.contains({action.unit, from}), "copies parameters that are newer elsewhere");
        stale_.erase({action.unit, to});
    }

    void give_gradients(const Action& action) {
        const BufferUse& from = action.reads.front();
        require(!pending_updates_.contains(action.unit), "overwrites gradients whose update is pending");
        on_host_.insert(action.unit);
        if (!are_gradients_offloaded(sharding_, rounds_of_gradients(action.unit), action.unit, part_)) return;
        // The buffer is free now.
        if (from.role == BufferRole::gradient_shard) shards_.erase(from.index);
        if (from.role == BufferRole::gradients) whole(from).state = Whole::handed_over;
    }
    int rounds_of_gradients(int unit) const { return step_.micro_batches * part_.unit(unit).rounds; }

    // A unit's directions are made, gathered if several ranks share its matrices, orthogonalised, and used.
    void visit_directions(const Action& action) {
        const bool is_shared = !sharding_.keeps_optimizer_whole() || step_.tensor.ranks > 1;
        switch (action.kind) {
            case ActionKind::momentum:
                require(directions_.unit < 0, "overwrites directions that are still needed");
                directions_ = {action.unit, Directions::own};
                return;
            case ActionKind::gather_directions:
                require(directions_ == Directions{action.unit, Directions::own}, "gathers no directions");
                directions_.state = Directions::gathered;
                return;
            case ActionKind::orthogonalise:
                require(directions_ ==
                            Directions{action.unit, is_shared ? Directions::gathered : Directions::own},
                        "lacks the directions of other ranks");
                directions_.state = Directions::orthogonal;
                return;
            case ActionKind::update: {
                const bool uses = std::ranges::find(action.reads, BufferRole::directions, &BufferUse::role) !=
                                  action.reads.end();
                require(!uses || directions_ == Directions{action.unit, Directions::orthogonal},
                        "updates matrices without directions");
                if (uses) directions_ = {};
                return;
            }
            default:
                return;
        }
    }

    // A buffer's piece, and what has been done to it.
    struct Held {
        std::pair<int, int> piece;
        bool is_updated;
    };
    void visit_disk(const Action& action) {
        if (action.piece < 0) return;
        const auto& uses = action.kind == ActionKind::read_state ? action.writes : action.reads;
        const auto use = std::ranges::find(uses, BufferRole::state_piece, &BufferUse::role);
        require(use != uses.end(), "names no buffer for its piece of state");
        const std::pair piece(action.unit, action.piece);
        const auto found = held_.find(use->index);
        if (action.kind == ActionKind::read_state) {
            require(found == held_.end(), "reads over a piece of state that the disk lacks");
            held_[use->index] = {piece, false};
            return;
        }
        require(found != held_.end() && found->second.piece == piece, "lacks its piece of state");
        if (action.kind == ActionKind::update) {
            found->second.is_updated = true;
        } else {
            require(found->second.is_updated, "writes a piece of state before its update");
            held_.erase(found);
        }
    }

    // Requires that an action on a unit, or on a part of the model, uses only its own buffers.
    void require_own(const Action& action, const BufferUse& use) const {
        if (use.role == BufferRole::recomputed)
            require(use.unit == action.part, "uses what another part recomputes");
        if (!belongs_to_unit(use.role)) return;
        const auto is_of_part = [&] {
            const std::vector<int>& units = part_.outline->part(action.part).units;
            return std::ranges::find(units, use.unit) != units.end();
        };
        require(action.unit >= 0 ? use.unit == action.unit : action.part < 0 || is_of_part(),
                "uses a buffer of another unit");
    }

    Whole& whole(const BufferUse& use) {
        const auto found = gradients_.find(use.index);
        require(found != gradients_.end() && found->second.unit == use.unit,
                "uses gradients that were never zeroed");
        return found->second;
    }

    void read(const Action& action, const BufferUse& use) {
        if (belongs_to_micro_batch(use.role)) {
            const auto found = owner_.find(place_of(action, use));
            require(found != owner_.end(), "reads an activation that nobody wrote");
            require(found->second == owner_of(action, use), "reads an activation of another micro-batch");
        }
        if (use.tier != Tier::device) return read_beside(action, use);
        switch (use.role) {
            case BufferRole::recomputed:
                require(recomputed_[use.index] == std::pair(use.unit, action.micro_batch),
                        "reads what is to be recomputed first");
                break;
            case BufferRole::parameter_shard: {
                require_updated(action, use);
                const auto found = parameter_shards_.find(use.index);
                require(found != parameter_shards_.end() && found->second == use.unit,
                        "reads a shard of parameters that is still on the disk");
                break;
            }
            case BufferRole::parameters: {
                require_updated(action, use);
                // A rank's own part of whole parameters needs no gather.
                if (action.kind == ActionKind::gather_parameters && ungathered_.contains(use.unit)) break;
                require(!ungathered_.contains(use.unit), "reads parameters that are not gathered");
                const auto found = parameters_.find(use.index);
                require(found != parameters_.end() && found->second == use.unit,
                        "reads parameters that are not gathered");
                break;
            }
            case BufferRole::gradients:
                read_gradients(action, whole(use));
                break;
            case BufferRole::gradient_shard:
                require(has_shard(use), "reads a shard of gradients that nobody reduced");
                if (action.kind == ActionKind::square) squared_.insert(use.unit);
                if (action.kind == ActionKind::square || action.kind == ActionKind::gather_gradients ||
                    action.kind == ActionKind::sum_tied)
                    require_added_up(use.unit);
                break;
            case BufferRole::gradient_sums: {
                const auto found = sums_.find(use.index);
                require(found != sums_.end() && found->second.unit == use.unit,
                        "takes gradient sums of another unit");
                require(found->second.state == Sums::filled, "takes gradient sums that nobody made");
                found->second.state = Sums::taken;
                break;
            }
            default:
                break;
        }
    }

    void require_updated(const Action& action, const BufferUse& use) const {
        require(action.kind == ActionKind::update || !pending_updates_.contains(use.unit),
                "reads parameters before their update");
        require(action.kind == ActionKind::update || !stale_.contains({use.unit, Tier::device}),
                "reads parameters of the device that the host has updated");
    }

    // Reads what lies in the host's memory or on a disk.
    void read_beside(const Action& action, const BufferUse& use) {
        if (use.role == BufferRole::gradients)
            require(on_host_.contains(use.unit), "reads gradients that the host lacks");
        if (use.role != BufferRole::parameters && use.role != BufferRole::parameter_shard) return;
        if (action.kind == ActionKind::upload_parameters)
            require(!sharding_.updates_what_is_uploaded() || !pending_updates_.contains(use.unit),
                    "reads parameters before their update");
        if (use.tier != Tier::host) return;
        const auto found = host_parameters_.find(use.index);
        require(found != host_parameters_.end() && found->second == use.unit,
                "reads parameters that are still on the disk");
    }
    void write_beside(const Action& action, const BufferUse& use) {
        if (use.role != BufferRole::parameters && use.role != BufferRole::parameter_shard) return;
        if (use.tier == Tier::disk)
            require(!pending_updates_.contains(use.unit),
                    "writes parameters to the disk before their update");
        if (use.tier != Tier::host) return;
        int& held = host_parameters_.try_emplace(use.index, -1).first->second;
        if (action.kind == ActionKind::read_parameters) {
            require(!stale_.contains({held, Tier::disk}), "reads over parameters that the disk lacks");
            held = use.unit;
        }
        require(held == use.unit, "writes over parameters of another unit");
    }

    bool has_shard(const BufferUse& use) const {
        const auto found = shards_.find(use.index);
        return found != shards_.end() && found->second == use.unit;
    }
    void require_added_up(int unit) const {
        for (const auto& [_, of] : gradients_)
            require(of.unit != unit || of.state != Whole::scattered,
                    "reads a shard of gradients that lacks a micro-batch");
    }

    void read_gradients(const Action& action, Whole& of) {
        switch (action.kind) {
            case ActionKind::square:
                squared_.insert(of.unit);
                break;
            case ActionKind::download_gradients:
                require(!sharding_.keeps_optimizer_whole() || of.state != Whole::scattered,
                        "gives the host only a shard of gradients");
                break;
            case ActionKind::reduce_scatter:
                require(of.state == Whole::accumulating, "reduces gradients a second time");
                break;
            case ActionKind::gather_gradients:
                require(of.state == Whole::scattered, "gathers gradients that are not scattered");
                break;
            case ActionKind::accumulate_shard:
                require(of.state == Whole::scattered, "adds a shard that nobody received");
                of.state = Whole::handed_over;
                break;
            default:
                break;
        }
    }

    void write(const Action& action, const BufferUse& use) {
        if (belongs_to_micro_batch(use.role)) owner_[place_of(action, use)] = owner_of(action, use);
        if (use.tier != Tier::device) return write_beside(action, use);
        switch (use.role) {
            case BufferRole::recomputed:
                recomputed_[use.index] = {use.unit, action.micro_batch};
                return;
            case BufferRole::parameters:
                return write_parameters(action, use);
            case BufferRole::parameter_shard:
                return write_parameter_shard(action, use);
            case BufferRole::gradient_sums:
                return write_sums(action, use);
            case BufferRole::gradients:
                return write_gradients(action, use);
            case BufferRole::gradient_shard:
                return write_shard(action, use);
            default:
                return;
        }
    }

    void write_parameters(const Action& action, const BufferUse& use) {
        if (action.kind == ActionKind::release) {
            require(parameters_.erase(use.index) == 1, "releases parameters that are not there");
            require(!sharding_.keeps_parameters_whole() || !lacks_update(use.unit),
                    "releases parameters that the host or the disk lacks");
            return;
        }
        const bool is_fetch = is_fetched(action);
        if (sharding_.keeps_parameters_whole() && !is_fetch) {
            if (action.kind == ActionKind::gather_parameters) ungathered_.erase(use.unit);
            return;
        }
        require(action.kind == ActionKind::gather_parameters || is_fetch, "must not write whole parameters");
        const auto found = parameters_.find(use.index);
        // The host's update of a share comes after the whole.
        require(found == parameters_.end() ||
                    (action.kind == ActionKind::upload_parameters && found->second == use.unit),
                "gathers or reads over parameters that are in use");
        parameters_[use.index] = use.unit;
    }

    // Whether an action brings what is offloaded to the device.
    bool is_fetched(const Action& action) const {
        return action.kind == ActionKind::upload_parameters ||
               (action.kind == ActionKind::read_parameters && !offload_.has_own_memory);
    }
    // Whether the place where a unit's parameters are offloaded to lacks what the device has.
    bool lacks_update(int unit) const {
        return !stale_.contains({unit, Tier::device}) && stale_.contains({unit, offload_.parameters});
    }

    void write_parameter_shard(const Action& action, const BufferUse& use) {
        int& held = parameter_shards_.try_emplace(use.index, -1).first->second;
        if (is_fetched(action)) {
            require(!lacks_update(held), "reads over parameters that the host or the disk lacks");
            held = use.unit;
        }
        require(held == use.unit, "updates a shard of parameters that is still on the disk");
    }

    void write_gradients(const Action& action, const BufferUse& use) {
        require(!norm_done_, "writes gradients after the norm");
        if (action.kind == ActionKind::upload_gradients) {
            const auto found = gradients_.find(use.index);
            require(found == gradients_.end() || found->second.state == Whole::handed_over,
                    "overwrites gradients that are still needed");
            require(!pending_updates_.contains(use.unit), "goes on with gradients whose update is pending");
            gradients_[use.index] = {use.unit, Whole::accumulating};
            return;
        }
        if (action.kind == ActionKind::zero || action.kind == ActionKind::round) {
            const auto found = gradients_.find(use.index);
            require(found == gradients_.end() || found->second.state == Whole::handed_over,
                    "overwrites gradients that are still needed");
            gradients_[use.index] = {use.unit, Whole::accumulating};
            with_gradients_.insert(use.unit);
            return;
        }
        Whole& of = whole(use);
        switch (action.kind) {
            case ActionKind::backward:
            case ActionKind::backward_weight:
            case ActionKind::accumulate:
            case ActionKind::sum_replicated:
                require(of.state == Whole::accumulating, "adds to gradients that were reduced");
                break;
            case ActionKind::reduce_scatter:
                of.state = Whole::scattered;
                break;
            case ActionKind::all_reduce:
                require(of.state == Whole::scattered, "sums shards that nobody received");
                break;
            case ActionKind::sum_tied:
                require(of.state == Whole::scattered || sharding_.ranks() == 1,
                        "sums shards that nobody received");
                require(tied_.insert(use.unit).second, "sums tied gradients a second time");
                break;
            case ActionKind::gather_gradients:
                of.state = Whole::complete;
                break;
            default:
                require(false, "must not write gradients");
        }
    }

    void write_shard(const Action& action, const BufferUse& use) {
        switch (action.kind) {
            case ActionKind::upload_gradients:
                require(!pending_updates_.contains(use.unit),
                        "goes on with gradients whose update is pending");
                require(shards_.try_emplace(use.index, use.unit).second,
                        "overwrites the shard of earlier micro-batches");
                break;
            case ActionKind::reduce_scatter:
                require(shards_.try_emplace(use.index, use.unit).second,
                        "overwrites the shard of earlier micro-batches");
                // The whole gradients that it read are free now.
                for (auto& [_, of] : gradients_) {
                    if (of.unit == use.unit) of.state = Whole::handed_over;
                }
                break;
            case ActionKind::sum_tied:
                require(tied_.insert(use.unit).second, "sums tied gradients a second time");
                [[fallthrough]];
            case ActionKind::all_reduce:
            case ActionKind::accumulate_shard:
                require(has_shard(use), "adds to a shard of gradients that nobody reduced");
                break;
            default:
                require(false, "must not write a shard of gradients");
        }
    }

    void write_sums(const Action& action, const BufferUse& use) {
        const auto found = sums_.find(use.index);
        if (action.kind == ActionKind::zero) {
            require(found == sums_.end() || found->second.state != Sums::filled,
                    "zeroes gradient sums that the gradients lack");
            sums_[use.index] = {use.unit, Sums::zeroed};
            return;
        }
        require(found != sums_.end() && found->second.state != Sums::taken,
                "adds to gradient sums that are not zeroed");
        require(found->second.unit == use.unit, "adds to gradient sums of another unit");
        found->second.state = Sums::filled;
    }

    const Step& step_;
    const Sharding& sharding_;
    const Offload& offload_;
    const StagePart& part_;
    std::size_t where_ = 0;                          // the action's position
    std::map<BufferPlace, Owner> owner_;             // the chunk and micro-batch that wrote it last
    std::map<int, std::pair<int, int>> recomputed_;  // the part and the micro-batch that use the memory
    std::map<int, int> parameters_;                  // by buffer: the unit whose whole parameters it holds
    std::map<int, int> parameter_shards_;            // by buffer: the unit whose shard it holds
    std::set<int> ungathered_;                       // units of which other ranks have updated their share
    std::map<int, int> host_parameters_;             // by buffer: the unit of which the host has parameters
    std::set<std::pair<int, Tier>> stale_;           // copies of units' parameters that are older than others
    std::set<int> on_host_;                          // units whose gradients, so far, the host has
    std::set<int> squared_;                          // units whose gradients are in the norm
    std::map<int, Sums> sums_;
    std::map<int, Whole> gradients_;
    std::map<int, int> shards_;  // by buffer: the unit whose gradient shard it holds
    std::set<int> with_gradients_, updated_;
    std::map<int, std::set<int>> pending_updates_;  // by unit: the pieces whose update is pending
    std::map<int, Held> held_;                      // by buffer of a piece of state
    Directions directions_;
    std::set<int> tied_;  // units whose gradients are summed over stages
    bool norm_done_ = false;
};

}  // namespace

void check_step(const Step& step) {
    Checker checker(step);
    for (std::size_t i = 0; i < step.actions.size(); ++i) checker.visit(step.actions[i], i);
    checker.finish();

    const std::vector<std::vector<int>> needed = dependencies(step);
    for (std::size_t i = 0; i < needed.size(); ++i) {
        const Action& action = step.actions[i];
        const auto waits_for = [&](int place) {
            const StreamKind stream = step.actions[static_cast<std::size_t>(place)].stream;
            return std::ranges::any_of(action.after, [&](int after) {
                return after >= place && step.actions[static_cast<std::size_t>(after)].stream == stream;
            });
        };
        for (const int after : action.after) {
            if (after >= static_cast<int>(i))
                programming_error(fmt::format("step: {} waits for a later action", describe(step, i)));
        }
        for (const int place : needed[i]) {
            if (!waits_for(place)) {
                programming_error(fmt::format("step: {} may run before action {}, on which it depends",
                                              describe(step, i), place));
            }
        }
    }
}

}  // namespace llmc
