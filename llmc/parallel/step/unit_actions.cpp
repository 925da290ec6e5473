// Makes the actions on units that surround the parts of the model, as ZeRO's stage requires.
#include "llmc/parallel/step/unit_actions.h"

#include <algorithm>
#include <utility>

#include "llmc/parallel/zero/state_pieces.h"

namespace llmc {

using enum BufferRole;

template <class F>
void UnitActions::for_each_unit(F&& f) const {
    for (int unit = 0; unit < part_.outline->units_count(); ++unit) {
        if (part_.has_unit(unit)) f(unit);
    }
}

void UnitActions::communicate(Action action) {
    action.stream = StreamKind::communication;
    add(std::move(action));
}

void UnitActions::communicate_data(Action action) {
    if (sharding_.ranks() > 1) communicate(std::move(action));
}

// ---- the buffers of a unit

BufferUse UnitActions::own_parameters(int unit) const { return parameters_in(Tier::device, unit); }

BufferUse UnitActions::reduced(int unit) const {
    if (!sharding_.keeps_gradient_shards(rounds(unit))) return whole_gradients(unit);
    return {gradient_shard, place_of_gradient_shard(sharding_, rounds(unit), unit, part_), unit};
}

BufferUse UnitActions::parameters_in(Tier tier, const Sharding& sharding, int unit, const StagePart& part) {
    const bool is_whole = sharding.keeps_parameters_whole();
    const int place = tier == Tier::disk   ? unit
                      : tier == Tier::host ? place_of_host_parameters(sharding, unit, part)
                      : is_whole           ? place_of_parameters(sharding, unit, part)
                                           : place_of_parameter_shard(sharding, unit, part);
    return {is_whole ? parameters : parameter_shard, place, unit, tier};
}

BufferUse UnitActions::sums(int unit) const {
    if (!spec_.rounds_gradients) return whole_gradients(unit);
    return {gradient_sums, place_of_gradient_sums(unit, part_), unit};
}

// ---- around the parts of the model

void UnitActions::release(int unit) {
    if (sharding_.keeps_parameters_whole() && !are_offloaded(unit)) return;
    add({.kind = ActionKind::release, .unit = unit, .reads = {}, .writes = {whole_parameters(unit)}});
}

void UnitActions::begin(int unit, Round round) {
    if (!starts_afresh(unit, round) && !spec_.rounds_gradients)
        return bring_gradients(unit, whole_gradients(unit));
    if (!spec_.rounds_gradients) make_room(unit);
    add({.kind = ActionKind::zero, .unit = unit, .reads = {}, .writes = {sums(unit)}});
}

void UnitActions::end(int unit, Round round) {
    const int number = ended_[unit]++;
    if (spec_.rounds_gradients && starts_afresh(unit, round)) {
        make_room(unit);
        add({.kind = ActionKind::round,
             .unit = unit,
             .reads = {sums(unit)},
             .writes = {whole_gradients(unit)}});
    } else if (spec_.rounds_gradients) {
        bring_gradients(unit, whole_gradients(unit));
        add({.kind = ActionKind::accumulate,
             .unit = unit,
             .round = number,
             .reads = {sums(unit), whole_gradients(unit)},
             .writes = {whole_gradients(unit)}});
    }
    accumulate_received();
    if (round.is_last || accumulates_shards(unit)) {
        sum_replicated(unit);
        reduce(unit, round);
    } else {
        give_gradients(unit, false);
    }
}

// Goes on with the sum of earlier rounds that the host has.
void UnitActions::bring_gradients(int unit, const BufferUse& to) {
    if (!leave_device(unit) || sharding_.rounds_are_consecutive) return;
    add({.kind = ActionKind::upload_gradients,
         .stream = StreamKind::to_device,
         .unit = unit,
         .reads = {gradients_on_host(unit)},
         .writes = {to}});
}

// Gives the host the sum of the rounds so far, if another unit needs the buffer, or what it updates with.
void UnitActions::give_gradients(int unit, bool are_complete) {
    if (!are_complete && (!leave_device(unit) || sharding_.rounds_are_consecutive)) return;
    if (!leave_device(unit) && !offload().updates_on_host()) return;
    if (leave_device(unit) && are_complete) square(unit);
    add({.kind = ActionKind::download_gradients,
         .stream = StreamKind::from_device,
         .unit = unit,
         .reads = {kept_gradients(unit)},
         .writes = {gradients_on_host(unit)}});
}

void UnitActions::square(int unit) {
    if (part_.counts_unit(unit))
        add({.kind = ActionKind::square, .unit = unit, .reads = {reduced(unit)}, .writes = {{squares}}});
}

// Called before a unit's whole gradients are overwritten. Blocks may share that buffer, and it may hold a
// received shard, which is then added to the sum first. This happens if successive blocks of a backward pass
// are not consecutive layers.
void UnitActions::make_room(int unit) {
    if (received_ >= 0 && whole_gradients(received_).index == whole_gradients(unit).index)
        accumulate_received();
}

// Sums gradients that each tensor-parallel rank computes from its own tokens only.
void UnitActions::sum_replicated(int unit) {
    if (spec_.tensor.ranks == 1 || !part_.outline->unit(unit).sums_replicated(spec_.tensor)) return;
    add({.kind = ActionKind::sum_replicated,
         .unit = unit,
         .reads = {whole_gradients(unit)},
         .writes = {whole_gradients(unit)}});
}

// Reduces a unit's gradients. At stage 0, this is a reduce-scatter and then an all-gather, which together
// make an all-reduce.
void UnitActions::reduce(int unit, Round round) {
    const BufferUse whole = whole_gradients(unit), sum = reduced(unit);
    const bool adds = accumulates_shards(unit) && !round.is_first;
    const BufferUse received = adds ? whole : sum;
    communicate_data(
        {.kind = ActionKind::reduce_scatter, .unit = unit, .reads = {whole}, .writes = {received}});
    if (sharding_.replicas > 1) {
        communicate(
            {.kind = ActionKind::all_reduce, .unit = unit, .reads = {received}, .writes = {received}});
    }
    if (adds) {
        received_ = unit;
        received_round_ = ended_[unit] - 1;
        received_last_ = round.is_last;
    }
    if (part_.is_tied(unit)) return;
    if (round.is_last) gather_gradients(unit);
    if (received_ != unit) give_gradients(unit, round.is_last);
}

// Gathers the whole gradients if the update reads them.
void UnitActions::gather_gradients(int unit) {
    if (!sharding_.keeps_optimizer_whole()) return;
    accumulate_received();
    communicate_data({.kind = ActionKind::gather_gradients,
                      .unit = unit,
                      .reads = {reduced(unit)},
                      .writes = {whole_gradients(unit)}});
}

void UnitActions::accumulate_received() {
    if (received_ < 0) return;
    const int unit = std::exchange(received_, -1);
    bring_gradients(unit, reduced(unit));
    add({.kind = ActionKind::accumulate_shard,
         .unit = unit,
         .round = received_round_,
         .reads = {whole_gradients(unit), reduced(unit)},
         .writes = {reduced(unit)}});
    // Gathered gradients are given later.
    if (!part_.is_tied(unit) && !sharding_.keeps_optimizer_whole()) give_gradients(unit, received_last_);
}

// ---- after all passes

void UnitActions::reduce_loss() {
    if (has_others()) communicate({.kind = ActionKind::reduce_loss, .reads = {{loss}}, .writes = {{loss}}});
}

void UnitActions::norm() {
    accumulate_received();
    if (spec_.reduces_amax && has_others())
        communicate({.kind = ActionKind::reduce_amax, .reads = {{amax}}, .writes = {{amax}}});
    finish_tied();
    Action square{.kind = ActionKind::square, .reads = {}, .writes = {{squares}}};
    for_each_unit([&](int unit) {
        if (part_.counts_unit(unit) && !leave_device(unit)) square.reads.push_back(reduced(unit));
    });
    add(std::move(square));
    if (has_others())
        communicate({.kind = ActionKind::gather_squares, .reads = {{squares}}, .writes = {{squares}}});
    add({.kind = ActionKind::norm, .reads = {{squares}}, .writes = {{BufferRole::norm}}});
}

void UnitActions::update(std::span<const int> units, bool releases) {
    if (!spec_.state_pieces.empty()) return update_from_disk(units, releases);
    for (const int unit : units) {
        const BufferUse state{optimizer, unit, unit, offload().state};
        if (spec_.units_with_directions.contains(unit)) make_directions(unit, state);
        add(update_of(unit, state));
        finish_updated(unit, releases, offload().updates_on_host());
    }
}

// Offloaded parameters are brought as others are needed: without master weights, or if no update is pending.
Action UnitActions::update_of(int unit, const BufferUse& state) const {
    const bool is_on_host = offload().updates_on_host();
    const BufferUse updated = is_on_host ? parameters_in(Tier::host, unit) : own_parameters(unit);
    Action action{
        .kind = ActionKind::update,
        .stream = is_on_host ? StreamKind::host : StreamKind::compute,
        .unit = unit,
        .reads = {is_on_host ? gradients_on_host(unit) : kept_gradients(unit), {BufferRole::norm}, state},
        .writes = {state, updated}};
    if (are_offloaded(unit)) action.reads.push_back(updated);
    if (spec_.units_with_directions.contains(unit)) action.reads.push_back(own_directions(unit));
    return action;
}

// A direction is made where the momentum is, and orthogonalised on the device.
void UnitActions::make_directions(int unit, const BufferUse& state) {
    const bool is_on_host = offload().updates_on_host();
    const BufferUse own = own_directions(unit), on_device{directions, 0, unit};
    add({.kind = ActionKind::momentum,
         .stream = is_on_host ? StreamKind::host : StreamKind::compute,
         .unit = unit,
         .reads = {is_on_host ? gradients_on_host(unit) : kept_gradients(unit), {BufferRole::norm}, state},
         .writes = {state, own}});
    if (is_on_host)
        add({.kind = ActionKind::upload_directions,
             .stream = StreamKind::to_device,
             .unit = unit,
             .reads = {own},
             .writes = {on_device}});
    if (!sharding_.keeps_optimizer_whole() || spec_.tensor.ranks > 1)
        communicate({.kind = ActionKind::gather_directions,
                     .unit = unit,
                     .reads = {on_device},
                     .writes = {on_device}});
    add({.kind = ActionKind::orthogonalise, .unit = unit, .reads = {on_device}, .writes = {on_device}});
    if (is_on_host)
        add({.kind = ActionKind::download_directions,
             .stream = StreamKind::from_device,
             .unit = unit,
             .reads = {on_device},
             .writes = {own}});
}

void UnitActions::move_parameters(ActionKind kind, int unit, Tier from, Tier to) {
    const StreamKind stream = kind == ActionKind::write_parameters    ? StreamKind::disk_out
                              : kind == ActionKind::upload_parameters ? StreamKind::to_device
                                                                      : StreamKind::from_device;
    add({.kind = kind,
         .stream = stream,
         .unit = unit,
         .reads = {parameters_in(from, unit)},
         .writes = {parameters_in(to, unit)}});
}

// Brings the parameters that this rank has updated, on the host or on the device, to all places that keep them.
void UnitActions::finish_updated(int unit, bool releases, bool is_on_host) {
    const bool is_uploaded_when_needed = are_offloaded(unit) && sharding_.updates_what_it_keeps();
    const bool stays_on_host = is_on_host && is_uploaded_when_needed;
    if (is_on_host && !stays_on_host)
        move_parameters(ActionKind::upload_parameters, unit, Tier::host, Tier::device);
    gather_updated(unit);
    if (!are_offloaded(unit)) return;
    if (offload().has_own_memory && !stays_on_host)
        move_parameters(ActionKind::download_parameters, unit, Tier::device, Tier::host);
    if (offload().parameters == Tier::disk)
        move_parameters(ActionKind::write_parameters, unit,
                        offload().has_own_memory ? Tier::host : Tier::device, Tier::disk);
    if (releases && sharding_.keeps_parameters_whole() && !stays_on_host) release(unit);
}

// The gradients with which this rank updates, on the device.
BufferUse UnitActions::kept_gradients(int unit) const {
    return sharding_.keeps_optimizer_whole() ? whole_gradients(unit) : reduced(unit);
}

// Each piece of state is read, updated and written in one of a few buffers, which take turns. A read comes in the list
// as early as it has a buffer: while a piece is updated, the next is read and the one before is written.
void UnitActions::update_from_disk(std::span<const int> units, bool releases) {
    struct PieceOfUnit {
        int unit, number, count;
    };
    std::vector<PieceOfUnit> pieces;
    for (const int unit : units) {
        const int count = spec_.state_pieces[static_cast<std::size_t>(unit)];
        for (int number = 0; number < count; ++number) pieces.push_back({unit, number, count});
    }
    const auto buffer = [&](int at) {
        return BufferUse{state_piece, at % state_buffers, -1,
                         offload().has_own_memory ? Tier::host : Tier::device};
    };
    const auto on_disk = [&](int at) {
        return BufferUse{optimizer, at, pieces[static_cast<std::size_t>(at)].unit, Tier::disk};
    };
    const auto read = [&](int at) {
        if (at >= std::ssize(pieces)) return;
        const PieceOfUnit& piece = pieces[static_cast<std::size_t>(at)];
        add({.kind = ActionKind::read_state,
             .stream = StreamKind::disk_in,
             .unit = piece.unit,
             .piece = piece.number,
             .reads = {on_disk(at)},
             .writes = {buffer(at)}});
    };
    for (int at = 0; at < state_buffers - 1; ++at) read(at);
    for (int at = 0; at < std::ssize(pieces); ++at) {
        const auto& [unit, number, count] = pieces[static_cast<std::size_t>(at)];
        Action update = update_of(unit, buffer(at));
        update.piece = number;
        add(std::move(update));
        read(at + state_buffers - 1);
        add({.kind = ActionKind::write_state,
             .stream = StreamKind::disk_out,
             .unit = unit,
             .piece = number,
             .reads = {buffer(at)},
             .writes = {on_disk(at)}});
        if (number + 1 == count) finish_updated(unit, releases, offload().updates_on_host());
    }
}

// Sums the gradients of units to which several stages contribute. It comes at the end of the list, when no
// stage waits for another's transfers any more.
void UnitActions::finish_tied() {
    for_each_unit([&](int unit) {
        if (!part_.is_tied(unit)) return;
        communicate({.kind = ActionKind::sum_tied,
                     .unit = unit,
                     .reads = {reduced(unit)},
                     .writes = {reduced(unit)}});
        gather_gradients(unit);
        give_gradients(unit, true);
    });
}

void UnitActions::gather_all_updated() {
    if (sharding_.keeps_optimizer_whole() || !sharding_.keeps_parameters_whole()) return;
    for_each_unit([&](int unit) { finish_updated(unit, true, false); });
}

// Gathers a unit's parameters, on ranks that keep them whole and have updated a shard.
void UnitActions::gather_updated(int unit) {
    if (sharding_.keeps_optimizer_whole() || !sharding_.keeps_parameters_whole()) return;
    communicate_data({.kind = ActionKind::gather_parameters,
                      .unit = unit,
                      .reads = {own_parameters(unit)},
                      .writes = {whole_parameters(unit)}});
}

namespace {

// Whether a pass computes the gradients of a part's parameters.
bool makes_gradients(PassKind pass, bool splits_backward) {
    return pass == PassKind::backward || (pass == PassKind::backward_weight && splits_backward) ||
           (pass == PassKind::backward_input && !splits_backward);
}

}  // namespace

GradientRounds::GradientRounds(const StepSpec& spec, std::span<const Pass> passes)
    : outline_(spec.part.outline.get()) {
    std::map<ChunkOfPass, std::pair<int, int>> spans;  // the first and the last pass of a kind and chunk
    for (int i = 0; i < std::ssize(passes); ++i) {
        const Pass& pass = passes[static_cast<std::size_t>(i)];
        spans.try_emplace({pass.kind, pass.chunk / spec.pipeline.stages}, i, i).first->second.second = i;
    }
    for (const auto& [key, span] : spans) {
        const Chunk& chunk = spec.part.chunks[static_cast<std::size_t>(key.second)];
        for (int part = chunk.end_part - 1; part >= chunk.first_part; --part) {
            if (!makes_gradients(key.first, splits_backward(*outline_, part, spec.recompute))) continue;
            for (const int unit : outline_->part(part).units) {
                if (!spec.part.trains(unit)) continue;
                FirstLast& ends =
                    first_last_.try_emplace(unit, FirstLast{span.first, span.second}).first->second;
                ends.first = std::min(ends.first, span.first);
                ends.last = std::max(ends.last, span.second);
                ends.first_part.try_emplace(key, part);
                ends.last_part[key] = part;
            }
        }
    }
}

GradientRounds::Units GradientRounds::units_at(const PassPlace& pass, int part,
                                               std::map<ChunkOfPass, int> FirstLast::*parts) const {
    std::vector<int> units = outline_->part(part).units;
    std::ranges::sort(units);
    if (parts == &FirstLast::last_part) std::ranges::reverse(units);
    Units found;
    for (const int unit : units) {
        const auto trained = first_last_.find(unit);
        if (trained == first_last_.end()) continue;
        const FirstLast& ends = trained->second;
        if ((ends.*parts).at({pass.kind, pass.chunk}) == part)
            found.push_back({unit, {ends.first == pass.number, ends.last == pass.number}});
    }
    return found;
}

}  // namespace llmc
