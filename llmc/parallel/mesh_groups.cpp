// Splits the world into the communicators of a mesh, in the same order on all ranks.
#include "llmc/parallel/mesh_groups.h"

#include <set>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {

namespace {

constexpr int none = -1;

}  // namespace

MeshGroups::MeshGroups(Communicator& world, const Mesh& mesh, std::span<const StagePart> parts, bool wraps)
    : world_(world) {
    check(world.size() == mesh.world() && world.rank() == mesh.rank, "the mesh has all ranks");
    const Sharding& sharding = mesh.sharding;
    const int stage_and_tensor = mesh.stage() * mesh.tensor + mesh.tensor_rank();
    if (mesh.pipeline > 1 || mesh.tensor > 1) data_ = split(world, stage_and_tensor, mesh.data_rank());
    if (mesh.tensor > 1)
        tensor_ = split(world, mesh.stage() * mesh.data_ranks() + mesh.data_rank(), mesh.tensor_rank());
    if (mesh.pipeline > 1 && mesh.tensor > 1) model_ = split(world, mesh.data_rank(), stage_and_tensor);
    if (mesh.pipeline > 1) {
        stages_ = split(world, mesh.data_rank() * mesh.tensor + mesh.tensor_rank(), mesh.stage());
        tie_stages(mesh, parts);
        link_stages(mesh, wraps);
    }
    if (sharding.replicas > 1) {
        const int shard = mesh.shard(), group = mesh.data_rank() / sharding.shards;
        shards_ = split(data(), group, shard);
        replicas_ = split(data(), shard, group);
    }
}

std::unique_ptr<Communicator> MeshGroups::split(Communicator& group, int color, int key, bool only_sends) {
    auto made = group.split(color, key, only_sends);
    if (made) made_.push_back(made.get());
    return made;
}

void MeshGroups::tie_stages(const Mesh& mesh, std::span<const StagePart> parts) {
    std::map<std::vector<bool>, std::shared_ptr<Communicator>> groups;  // by the stages that are in them
    std::set<int> tied;  // in the same order on all ranks, which make the communicators together
    for (const StagePart& part : parts) {
        for (const auto& [unit, unit_place] : part.units) {
            if (unit_place.stages > 1) tied.insert(unit);
        }
    }
    for (const int unit : tied) {
        std::vector<bool> stages;
        for (const StagePart& part : parts) stages.push_back(part.has_unit(unit));
        const bool is_here = stages[static_cast<std::size_t>(mesh.stage())];
        if (!groups.contains(stages)) groups[stages] = split(*stages_, is_here ? 0 : none, mesh.stage());
        if (is_here) tied_[unit] = groups[stages];
    }
}

void MeshGroups::link_stages(const Mesh& mesh, bool wraps) {
    const int stages = mesh.pipeline, stage = mesh.stage();
    // The round in which the communicator of stages (e, e + 1) is made, for each direction. Pairs without a
    // common stage are made in one round: first even e, then odd e. With an odd number of stages, the pair
    // (last, first) needs a third round.
    const auto round_of = [&](int edge) {
        if (edge + 1 == stages && !wraps) return none;
        return edge + 1 == stages && stages % 2 == 1 ? 2 : edge % 2;
    };
    // The pairs with the next stage and with the stage before.
    const int pair_with_next = stage, pair_with_previous = (stage + stages - 1) % stages;
    for (const bool forward : {true, false}) {
        for (int round = 0; round < 3; ++round) {
            const int edge = round_of(pair_with_next) == round       ? pair_with_next
                             : round_of(pair_with_previous) == round ? pair_with_previous
                                                                     : none;
            // Rank 0 of a pair sends the activations, also in the pair (last, first).
            std::shared_ptr<Communicator> pair = split(*stages_, edge, edge == pair_with_next ? 0 : 1, true);
            if (!pair) continue;
            const bool is_source = edge == pair_with_next;
            StageLink& link = forward ? (is_source ? activations_out_ : activations_in_)
                                      : (is_source ? gradients_in_ : gradients_out_);
            link = {std::move(pair), is_source ? 1 : 0};
        }
    }
}

Communicator& MeshGroups::tied(int unit) const {
    const auto found = tied_.find(unit);
    check(found != tied_.end(), "a unit that several stages have");
    return *found->second;
}

const StageLink& MeshGroups::link(ActionKind kind) const {
    switch (kind) {
        case ActionKind::receive_activation:
            return activations_in_;
        case ActionKind::send_activation:
            return activations_out_;
        case ActionKind::receive_gradient:
            return gradients_in_;
        case ActionKind::send_gradient:
            return gradients_out_;
        default:
            programming_error("not a transfer between stages");
    }
}

void MeshGroups::for_each(const std::function<void(Communicator&)>& f) const {
    for (Communicator* group : made_) f(*group);
}

}  // namespace llmc
