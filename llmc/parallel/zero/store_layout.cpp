// Gives each unit its buffers by ZeRO's stage and by what is offloaded.
#include "llmc/parallel/zero/store_layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "llmc/core/error.h"
#include "llmc/core/scratch_file.h"
#include "llmc/device/eight_bit_state.h"
#include "llmc/device/ops.h"

namespace llmc {

bool is_small(const UnitLayout::Entry& entry) { return entry.spec.shape.elements() < least_in_8_bits; }

std::vector<std::int64_t> places_of_small(const UnitLayout& unit) {
    std::vector<std::int64_t> places = {0};
    for (const UnitLayout::Entry& entry : unit.entries())
        places.push_back(places.back() + (is_small(entry) ? (entry.stored.elements() + 3) / 4 * 4 : 0));
    return places;
}

std::vector<OptimizerRun> optimizer_runs(const UnitLayout& unit, const Outline::OutlinedUnit& outlined,
                                         const StoreDtypes& dtypes, int ranks) {
    std::vector<OptimizerRun> runs;
    for (const UnitLayout::Entry& entry : unit.entries()) {
        const Optimizer* optimizer = &dtypes.optimizer_of(outlined, entry.spec);
        if (!runs.empty() && runs.back().optimizer == optimizer) continue;
        if (!runs.empty()) runs.back().range.end = entry.offset;
        runs.push_back({optimizer, {runs.empty() ? 0 : entry.offset, 0}});
    }
    if (!runs.empty()) runs.back().range.end = unit.padded_elements(ranks);
    return runs;
}

bool is_packed(std::span<const OptimizerRun> runs, std::size_t state) {
    return std::ranges::any_of(runs,
                               [&](const OptimizerRun& run) { return run.optimizer->state.size() <= state; });
}

namespace {

// The most elements of a tensor of state on any of the ranks that share it.
std::int64_t elements_of_state(std::span<const OptimizerRun> runs, std::size_t state, std::int64_t updated,
                               int shards) {
    if (!is_packed(runs, state)) return updated;
    std::int64_t most = 0;
    for (int shard = 0; shard < shards; ++shard) {
        std::int64_t elements = 0;
        for (const OptimizerRun& run : runs)
            if (run.optimizer->state.size() > state)
                elements += intersection(run.range, {shard * updated, (shard + 1) * updated}).size();
        most = std::max(most, elements);
    }
    return most;
}

void add_pieces(StoreLayout& store, std::int64_t updated) {
    std::vector<StatePiece>& pieces = store.pieces.emplace_back();
    const std::int64_t most = elements_of_piece(updated, store.dtypes.least_piece);
    for (std::int64_t begin = 0; begin < updated; begin += most) {
        const std::int64_t end = std::min(begin + most, updated);
        pieces.push_back({begin, end, store.file_bytes});
        store.file_bytes += store.dtypes.piece_bytes(end - begin).all;
    }
}

// As bytes, whose offsets in the arena of moments, which has nothing else, are multiples of 4096. The arena is that of
// the host, which reads and writes the disk.
void add_piece_buffers(StoreLayout& store, MemoryLayout& layout) {
    std::int64_t most = 0;
    for (const std::vector<StatePiece>& pieces : store.pieces)
        for (const StatePiece& piece : pieces) most = std::max(most, piece.elements());
    const std::size_t bytes = store.dtypes.piece_bytes(most).all;
    for (int buffer = 0; buffer < state_buffers; ++buffer)
        store.piece_buffers.push_back(
            layout.add(ArenaKind::moments, fmt::format("a piece of state, {}", buffer), DType::uint8,
                       {static_cast<std::int64_t>(bytes)}, buffer_alignment,
                       store.sharding.offload.has_own_memory ? Tier::host : Tier::device));
}

// One set of buffers serves all matrices, one after the other.
std::optional<DirectionBuffers<BufferId>> lay_out_directions(StoreLayout& store, MemoryLayout& layout,
                                                             TensorRank tensor, bool trains) {
    const Sharding& sharding = store.sharding;
    std::int64_t unit_elements = 0, updated = 0, elements = 0, rows = 0;
    for (std::size_t number = 0; number < store.units.size(); ++number) {
        const Outline::OutlinedUnit& outlined = store.part.outline->unit(static_cast<int>(number));
        if (!store.part.has_unit(static_cast<int>(number)) || !store.dtypes.has_directions(outlined))
            continue;
        const std::int64_t of_unit = store.units[number].padded_elements(sharding.ranks());
        unit_elements = std::max(unit_elements, of_unit);
        updated = std::max(updated, sharding.keeps_optimizer_whole() ? of_unit : of_unit / sharding.shards);
        for (const ParamSpec& spec : outlined.spec.params) {
            if (!store.dtypes.has_directions(outlined, spec)) continue;
            const MatrixSizes sizes = matrix_sizes(spec);
            elements = std::max(elements, sizes.padded_elements());
            rows = std::max(rows, sizes.fewer());
        }
    }
    if (unit_elements == 0) return std::nullopt;
    const DType D = store.dtypes.of_directions();
    const auto add = [&](ArenaKind arena, const char* name, DType dtype, const Shape& shape,
                         Tier tier = Tier::device) {
        return layout.add(arena, name, dtype, trains ? shape : Shape{0}, buffer_alignment, tier);
    };
    const bool is_on_host = sharding.offload.updates_on_host();
    return DirectionBuffers<BufferId>{
        .directions = add(ArenaKind::communication, "directions", D, {tensor.size, unit_elements}),
        .own_on_host = add(ArenaKind::communication, "directions", D, {is_on_host ? updated : 0},
                           is_on_host ? Tier::host : Tier::device),
        .matrix = add(ArenaKind::workspace, "a matrix's direction", D, {elements}),
        .product = add(ArenaKind::workspace, "its product", D, {elements}),
        .square = add(ArenaKind::workspace, "its square", D, {rows, rows}),
        .squared = add(ArenaKind::workspace, "the square's square", D, {rows, rows}),
        .partials =
            add(ArenaKind::workspace, "its norm's blocks", DType::fp32, {elements / norm_block_elements}),
        .norm = add(ArenaKind::workspace, "its norm", DType::fp64, {1})};
}

}  // namespace

MatrixSizes matrix_sizes(const ParamSpec& spec) {
    const std::int64_t columns = spec.shape.last();
    return {spec.shape.elements() / columns / spec.matrices, columns};
}

StoreLayout lay_out_store(MemoryLayout& layout, const StoreDtypes& dtypes, const StagePart& part,
                          const Sharding& sharding, int micro_batches, TensorRank tensor, bool trains) {
    const DType dtype = dtypes.compute;
    check(dtypes.gradients == DType::fp32 || dtypes.gradients == dtype,
          "gradients are fp32 or of the compute dtype");
    const Offload& offload = sharding.offload;
    StoreLayout store{.dtypes = dtypes, .sharding = sharding, .part = part, .units = {}, .buffers = {}};
    for (const Outline::OutlinedUnit& outlined : part.outline->units) {
        const UnitLayout& unit = store.units.emplace_back(outlined.spec, tensor);
        const auto number = static_cast<int>(store.buffers.size());
        store.parameter_places.emplace_back();
        if (!part.has_unit(number)) {
            store.buffers.emplace_back();
            store.pieces.emplace_back();
            continue;
        }
        const int rounds = micro_batches * part.unit(number).rounds;
        const std::int64_t elements = unit.padded_elements(sharding.ranks());
        const Shape whole{elements}, shard{elements / sharding.shards};
        const Shape& updated = sharding.keeps_optimizer_whole() ? whole : shard;
        const bool is_trained = trains && !outlined.spec.is_frozen();
        const auto if_training = [&](const Shape& shape) { return is_trained ? shape : Shape{0}; };

        // Blocks that share a buffer use that of the first such block.
        const auto at = [&](int place, BufferId UnitBufferIds::*buffer, auto&& make) {
            return place == number ? make() : store.buffers[static_cast<std::size_t>(place)].*buffer;
        };
        UnitBufferIds ids{};
        const bool is_offloaded = are_parameters_offloaded(sharding, number, part);
        const bool is_on_disk = is_offloaded && offload.parameters == Tier::disk;
        const std::size_t of_disk = is_on_disk ? ScratchFile::alignment : buffer_alignment,
                          alignment = offload.has_own_memory ? buffer_alignment : of_disk;
        const auto add_parameters = [&](const std::string& name, const Shape& of, std::size_t aligned,
                                        Tier tier = Tier::device) {
            const StoredParameters stored = stored_parameters(outlined.spec, of.elements(), dtype);
            return layout.add(ArenaKind::parameters, name, stored.dtype, {stored.elements}, aligned, tier);
        };
        ids.parameters = at(place_of_parameters(sharding, number, part), &UnitBufferIds::parameters,
                            [&] { return add_parameters(unit.name(), whole, alignment); });
        if (!sharding.keeps_parameters_whole()) {
            const int place = place_of_parameter_shard(sharding, number, part);
            ids.parameter_shard = place == number
                                      ? add_parameters(unit.name() + ".shard", shard, alignment)
                                      : store.buffers[static_cast<std::size_t>(place)].parameter_shard;
        }
        const Shape& kept = sharding.keeps_parameters_whole() ? whole : shard;
        if (is_on_disk) {
            store.parameter_places.back() = store.file_bytes;
            store.file_bytes +=
                whole_blocks(stored_parameters(outlined.spec, kept.elements(), dtype).bytes());
        }
        const bool is_updated_on_host = offload.updates_on_host() && !outlined.spec.is_frozen();
        if (is_updated_on_host || (is_offloaded && offload.has_own_memory)) {
            const int place = place_of_host_parameters(sharding, number, part);
            ids.host_parameters =
                place == number
                    ? add_parameters(unit.name(), is_offloaded ? kept : updated, of_disk, Tier::host)
                    : store.buffers[static_cast<std::size_t>(place)].host_parameters;
        }
        if (is_updated_on_host)
            ids.host_gradients = layout.add(ArenaKind::gradients, unit.name(), dtypes.gradients,
                                            if_training(updated), buffer_alignment, Tier::host);
        ids.gradients =
            at(place_of_gradients(sharding, rounds, number, part), &UnitBufferIds::gradients, [&] {
                return layout.add(ArenaKind::gradients, unit.name(), dtypes.gradients, if_training(whole));
            });
        if (sharding.keeps_gradient_shards(rounds)) {
            const int place = place_of_gradient_shard(sharding, rounds, number, part);
            ids.gradient_shard = place == number
                                     ? layout.add(ArenaKind::gradients, unit.name() + ".shard",
                                                  dtypes.gradients, if_training(shard))
                                     : store.buffers[static_cast<std::size_t>(place)].gradient_shard;
        }
        ids.gradient_sums =
            dtypes.gradients == DType::fp32
                ? ids.gradients
                : at(place_of_gradient_sums(number, part), &UnitBufferIds::gradient_sums, [&] {
                      return layout.add(ArenaKind::gradients, unit.name() + ".sums", DType::fp32,
                                        if_training(whole));
                  });
        if (outlined.spec.is_frozen()) {
            store.buffers.push_back(ids);
            store.pieces.emplace_back();
            continue;
        }
        if (offload.state == Tier::disk) {
            add_pieces(store, updated[0]);
            store.buffers.push_back(ids);
            continue;
        }
        if (dtypes.keeps_master())
            ids.master = layout.add(ArenaKind::master, unit.name(), DType::fp32, updated, buffer_alignment,
                                    offload.state);
        const DType moments = dtypes.moments_of(outlined);
        const auto beside = [&](const std::string& name, std::int64_t count) {
            const bool is_there = trains && moments == DType::uint8;
            return layout.add(ArenaKind::moments, name, DType::fp32, {is_there ? count : 0});
        };
        const std::vector<OptimizerRun> runs = optimizer_runs(unit, outlined, dtypes, sharding.ranks());
        for (int i = 0; i < dtypes.states(); ++i) {
            const std::string name = fmt::format("{}.state{}", unit.name(), i + 1);
            const std::int64_t count =
                elements_of_state(runs, static_cast<std::size_t>(i), updated[0],
                                  sharding.keeps_optimizer_whole() ? 1 : sharding.shards);
            ids.state.push_back({layout.add(ArenaKind::moments, name, moments, if_training({count}),
                                            buffer_alignment, offload.state),
                                 beside(name + ".amax", updated[0] / eight_bit_block),
                                 beside(name + ".packed", places_of_small(unit).back())});
        }
        store.buffers.push_back(ids);
        store.pieces.emplace_back();
    }
    if (offload.state == Tier::disk) add_piece_buffers(store, layout);
    store.directions = lay_out_directions(store, layout, tensor, trains);
    return store;
}

}  // namespace llmc
