// Makes the actions on units that surround the parts of the model, as ZeRO's stage requires.
#include "llmc/parallel/zero/unit_actions.h"

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

BufferUse UnitActions::own_parameters(int unit) const {
    if (sharding_.keeps_parameters_whole()) return whole_parameters(unit);
    return {parameter_shard, place_of_parameter_shard(sharding_, unit, part_), unit};
}

BufferUse UnitActions::reduced(int unit) const {
    if (!sharding_.keeps_gradient_shards(rounds(unit))) return whole_gradients(unit);
    return {gradient_shard, unit, unit};
}

BufferUse UnitActions::sums(int unit) const {
    if (!spec_.rounds_gradients) return whole_gradients(unit);
    return {gradient_sums, place_of_gradient_sums(unit, part_), unit};
}

// ---- around the parts of the model

void UnitActions::release(int unit) {
    if (sharding_.keeps_parameters_whole() && !are_on_disk(unit)) return;
    add({.kind = ActionKind::release, .unit = unit, .reads = {}, .writes = {whole_parameters(unit)}});
}

void UnitActions::begin(int unit, Round round) {
    if (!starts_afresh(unit, round) && !spec_.rounds_gradients) return;
    if (!spec_.rounds_gradients) make_room(unit);
    add({.kind = ActionKind::zero, .unit = unit, .reads = {}, .writes = {sums(unit)}});
}

void UnitActions::end(int unit, Round round) {
    if (spec_.rounds_gradients && starts_afresh(unit, round)) {
        make_room(unit);
        add({.kind = ActionKind::round,
             .unit = unit,
             .reads = {sums(unit)},
             .writes = {whole_gradients(unit)}});
    } else if (spec_.rounds_gradients) {
        add({.kind = ActionKind::accumulate,
             .unit = unit,
             .reads = {sums(unit), whole_gradients(unit)},
             .writes = {whole_gradients(unit)}});
    }
    accumulate_received();
    if (round.is_last || accumulates_shards(unit)) {
        sum_replicated(unit);
        reduce(unit, round);
    }
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
    if (adds) received_ = unit;
    if (round.is_last && !part_.is_tied(unit)) gather_gradients(unit);
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
    add({.kind = ActionKind::accumulate_shard,
         .unit = unit,
         .reads = {whole_gradients(unit), reduced(unit)},
         .writes = {reduced(unit)}});
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
        if (part_.counts_unit(unit)) square.reads.push_back(reduced(unit));
    });
    add(std::move(square));
    if (has_others())
        communicate({.kind = ActionKind::gather_squares, .reads = {{squares}}, .writes = {{squares}}});
    add({.kind = ActionKind::norm, .reads = {{squares}}, .writes = {{BufferRole::norm}}});
}

void UnitActions::update(std::span<const int> units, bool releases) {
    if (!spec_.state_pieces.empty()) return update_from_disk(units, releases);
    for (const int unit : units) {
        add({.kind = ActionKind::update,
             .unit = unit,
             .reads = read_by_update(unit, {optimizer, unit, unit}),
             .writes = {{optimizer, unit, unit}, own_parameters(unit)}});
        finish_updated(unit, releases);
    }
}

// Parameters on a disk are read as others are needed: without master weights, or if no update waits.
std::vector<BufferUse> UnitActions::read_by_update(int unit, const BufferUse& state) const {
    std::vector<BufferUse> reads = {updated_gradients(unit), {BufferRole::norm}, state};
    if (are_on_disk(unit)) reads.push_back(own_parameters(unit));
    return reads;
}

void UnitActions::finish_updated(int unit, bool releases) {
    gather_updated(unit);
    if (!are_on_disk(unit)) return;
    add({.kind = ActionKind::write_parameters,
         .stream = StreamKind::disk_out,
         .unit = unit,
         .reads = {own_parameters(unit)},
         .writes = {{stored_parameters, unit, unit}}});
    if (releases && sharding_.keeps_parameters_whole()) release(unit);
}

BufferUse UnitActions::updated_gradients(int unit) const {
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
    const auto buffer = [](int at) { return BufferUse{state_piece, at % state_buffers}; };
    const auto on_disk = [&](int at) {
        return BufferUse{optimizer, at, pieces[static_cast<std::size_t>(at)].unit};
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
        add({.kind = ActionKind::update,
             .unit = unit,
             .piece = number,
             .reads = read_by_update(unit, buffer(at)),
             .writes = {buffer(at), own_parameters(unit)}});
        read(at + state_buffers - 1);
        add({.kind = ActionKind::write_state,
             .stream = StreamKind::disk_out,
             .unit = unit,
             .piece = number,
             .reads = {buffer(at)},
             .writes = {on_disk(at)}});
        if (number + 1 == count) finish_updated(unit, releases);
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
    });
}

void UnitActions::gather_all_updated() {
    if (sharding_.keeps_optimizer_whole() || !sharding_.keeps_parameters_whole()) return;
    for_each_unit([&](int unit) { finish_updated(unit, true); });
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
        const FirstLast& ends = first_last_.at(unit);
        if ((ends.*parts).at({pass.kind, pass.chunk}) == part)
            found.push_back({unit, {ends.first == pass.number, ends.last == pass.number}});
    }
    return found;
}

}  // namespace llmc
