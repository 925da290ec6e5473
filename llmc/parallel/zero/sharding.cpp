// Chooses the shared buffers that units take in turn, and describes a sharding in words.
#include "llmc/parallel/zero/sharding.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace llmc {

namespace {

// The unit whose buffer this unit uses. The stage's layers of a class take `buffers` buffers in turn.
int turn(int unit, const StagePart& part, int buffers) {
    const auto alike = part.alike.find(part.outline->unit(unit).class_of_layers);
    if (alike == part.alike.end()) return unit;
    return alike->second[static_cast<std::size_t>(part.unit(unit).turn % buffers)];
}

}  // namespace

std::optional<Sharding> Sharding::next_stage(bool default_reduction) const {
    constexpr int last = 3;
    if (stage == last || ranks() == 1) return std::nullopt;
    Sharding next = *this;
    ++next.stage;
    if (default_reduction) next.reduces_each_micro_batch = next.reduces_each_micro_batch_by_default();
    return next;
}

std::string Sharding::description() const {
    constexpr std::array<std::string_view, 4> sharded = {
        "", "optimizer state", "gradients and optimizer state", "parameters, gradients and optimizer state"};
    if (stage == 0) return "";
    std::string text =
        fmt::format("ZeRO-{}: {} sharded {} ways", stage, sharded[static_cast<std::size_t>(stage)], shards);
    if (replicas > 1) text += fmt::format(", {} replicas", replicas);
    return text;
}

namespace {

bool is_layer(int unit, const StagePart& part) {
    return part.alike.contains(part.outline->unit(unit).class_of_layers);
}

}  // namespace

bool are_parameters_offloaded(const Sharding& sharding, int unit, const StagePart& part) {
    return sharding.offload.has_parameters() && is_layer(unit, part);
}

bool are_gradients_offloaded(const Sharding& sharding, int rounds, int unit, const StagePart& part) {
    return sharding.offload.updates_on_host() && is_layer(unit, part) &&
           (sharding.ranks() == 1 || sharding.rotates_gradients(rounds));
}

int place_of_parameters(const Sharding& sharding, int unit, const StagePart& part) {
    if (sharding.keeps_parameters_whole())
        return sharding.offload.has_parameters() ? turn(unit, part, sharding.fetched_ahead() + 1) : unit;
    return sharding.reshards_after_forward ? turn(unit, part, sharding.gathered_ahead() + 1) : unit;
}

int place_of_parameter_shard(const Sharding& sharding, int unit, const StagePart& part) {
    return sharding.offload.has_parameters() ? turn(unit, part, sharding.fetched_ahead() + 1) : unit;
}

int place_of_host_parameters(const Sharding& sharding, int unit, const StagePart& part) {
    return sharding.offload.parameters == Tier::disk ? turn(unit, part, sharding.read_ahead() + 1) : unit;
}

int place_of_gradients(const Sharding& sharding, int rounds, int unit, const StagePart& part) {
    // The gradients in one buffer are reduced while the other is written.
    const bool takes_turns =
        sharding.rotates_gradients(rounds) || are_gradients_offloaded(sharding, rounds, unit, part);
    return takes_turns ? turn(unit, part, 2) : unit;
}

int place_of_gradient_shard(const Sharding& sharding, int rounds, int unit, const StagePart& part) {
    return are_gradients_offloaded(sharding, rounds, unit, part) ? turn(unit, part, 2) : unit;
}

int place_of_gradient_sums(int unit, const StagePart& part) { return turn(unit, part, 1); }

}  // namespace llmc
