// Binds a rank's state to the arenas and the disk, fills its weights, and reads and writes its parts.
#include "llmc/parallel/zero/parameter_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "llmc/device/nf4.h"
#include "llmc/device/stochastic_rounding.h"

namespace llmc {

namespace {

// The buffer for transfers outside a step.
constexpr std::size_t beside_step = 0;

}  // namespace

ParameterStore::ParameterStore(Device& device, const Arenas& arenas, const StoreLayout& layout,
                               double weight_decay, int shard, const std::string& directory,
                               const HyperparameterValues& numbers)
    : device_(device),
      dtypes_(layout.dtypes),
      sharding_(layout.sharding),
      part_(layout.part),
      shard_(shard),
      pieces_(layout.pieces),
      parameter_places_(layout.parameter_places),
      layouts_(layout.units) {
    if (layout.file_bytes > 0) {
        const Offload& offload = sharding_.offload;
        const bool has_state = offload.state == Tier::disk, has_parameters = offload.parameters == Tier::disk;
        file_ =
            std::make_unique<ScratchFile>(directory, layout.file_bytes,
                                          fmt::format("{}{}{}", has_state ? "--offload-optimizer none" : "",
                                                      has_state && has_parameters ? " " : "",
                                                      has_parameters ? "--offload-parameters none" : ""));
    }
    for (const BufferId& buffer : layout.piece_buffers) piece_buffers_.push_back(arenas[buffer]);
    if (layout.directions) {
        const auto& ids = *layout.directions;
        directions_ = {arenas[ids.directions], arenas[ids.own_on_host], arenas[ids.matrix],
                       arenas[ids.product],    arenas[ids.square],      arenas[ids.squared],
                       arenas[ids.partials],   arenas[ids.norm]};
    }
    const bool whole = sharding_.keeps_optimizer_whole();
    for (const UnitBufferIds& ids : layout.buffers) {
        UnitBuffers& unit = buffers_.emplace_back();
        groups_.emplace_back();
        const auto number = static_cast<int>(buffers_.size()) - 1;
        if (!has(number)) continue;
        unit.parameters = arenas[ids.parameters];
        unit.gradients = arenas[ids.gradients];
        unit.gradient_sums = arenas[ids.gradient_sums];
        if (!is_state_on_disk()) {
            for (std::size_t i = 0; i < ids.state.size(); ++i) {
                const UnitBufferIds::State& state = ids.state[i];
                unit.state[i] = {arenas[state.values], arenas[state.amax], arenas[state.packed]};
            }
        }
        unit.parameter_shard =
            ids.parameter_shard ? arenas[*ids.parameter_shard] : own_shard(unit.parameters);
        unit.gradient_shard = ids.gradient_shard ? arenas[*ids.gradient_shard] : own_shard(unit.gradients);
        unit.updated_parameters = whole ? unit.parameters : unit.parameter_shard;
        unit.updated_gradients = whole ? unit.gradients : unit.gradient_shard;
        if (ids.master) unit.master = arenas[*ids.master];
        if (!has_master(number)) unit.master = unit.updated_parameters;
        if (ids.host_parameters) unit.host_parameters = arenas[*ids.host_parameters];
        if (ids.host_gradients) unit.host_gradients = arenas[*ids.host_gradients];
        if (!is_frozen(number)) groups_.back() = make_groups(number, weight_decay, numbers);
    }
}

std::vector<UpdateGroup> ParameterStore::make_groups(int unit, double weight_decay,
                                                     const HyperparameterValues& numbers) const {
    const ElementRange own = updated(unit);
    const std::vector<OptimizerRun> runs =
        optimizer_runs(layout(unit), part_.outline->unit(unit), dtypes_, sharding_.ranks());
    const std::vector<std::int64_t> places = places_of_small(layout(unit));
    std::vector<UpdateGroup> groups;
    std::array<std::int64_t, most_states> packed{};
    for (const OptimizerRun& run : runs) {
        const ElementRange range = intersection(run.range, own);
        if (range.size() == 0) continue;
        UpdateGroup& group = groups.emplace_back(
            UpdateGroup{run.optimizer, {range.begin - own.begin, range.end - own.begin}, {}, {}});
        for (std::size_t i = 0; i < run.optimizer->state.size(); ++i)
            group.in_state[i] =
                is_packed(runs, i) ? std::exchange(packed[i], packed[i] + range.size()) : group.range.begin;
        std::size_t place = 0;
        for (const UnitLayout::Entry& entry : layout(unit).entries()) {
            const std::int64_t small = places[place++];
            const ElementRange part =
                intersection({entry.offset, entry.offset + entry.shape.elements()}, range);
            if (part.size() == 0) continue;
            const auto columns = static_cast<double>(entry.spec.shape.last()),
                       rows = static_cast<double>(entry.spec.shape.elements()) / columns;
            const auto factor = run.optimizer->rate_factor;
            group.segments.push_back(
                {.begin = part.begin - range.begin,
                 .end = part.end - range.begin,
                 .weight_decay = entry.spec.decays() ? weight_decay : 0.0,
                 .in_packed = is_in_8_bits(unit, Kept::state1) && is_small(entry)
                                  ? small + part.begin - entry.offset
                                  : -1,
                 .rate_factor = factor ? factor(rows / entry.spec.matrices, columns, numbers) : 1});
        }
    }
    return groups;
}

ElementRange ParameterStore::shard(int unit, int shard) const {
    const std::int64_t size = elements(unit) / sharding_.shards;
    return {shard * size, (shard + 1) * size};
}

ElementRange ParameterStore::updated(int unit) const {
    return sharding_.keeps_optimizer_whole() ? ElementRange{0, elements(unit)} : shard(unit, shard_);
}

std::int64_t ParameterStore::element_number(int unit, std::int64_t element) const {
    std::int64_t first = element;
    for (int before = 0; before < unit; ++before) first += layout(before).padded_elements(1);
    return first;
}

Tensor ParameterStore::own_shard(const Tensor& flat) const {
    const std::int64_t elements = flat.elements() / sharding_.shards;
    return flat.flat(shard_ * elements, elements);
}

int ParameterStore::begin_read(int unit, int piece, int buffer) const {
    const StatePiece& of = pieces(unit)[static_cast<std::size_t>(piece)];
    return file_->begin_read(of.place, piece_buffers_[static_cast<std::size_t>(buffer)].data,
                             dtypes_.piece_bytes(of.elements()).all);
}

int ParameterStore::begin_write(int unit, int piece, int buffer) const {
    const StatePiece& of = pieces(unit)[static_cast<std::size_t>(piece)];
    return file_->begin_write(of.place, piece_buffers_[static_cast<std::size_t>(buffer)].data,
                              dtypes_.piece_bytes(of.elements()).all);
}

UnitBuffers ParameterStore::operands(int unit) const {
    UnitBuffers of = buffers(unit);
    const bool is_on_host = sharding_.offload.updates_on_host();
    if (dtypes_.has_directions(part_.outline->unit(unit)))
        of.directions = is_on_host ? own_directions_on_host(unit) : own_directions(unit);
    if (!is_on_host) return of;
    const bool is_share = of.host_parameters.elements() == updated(unit).size();
    of.updated_parameters = is_share ? of.host_parameters : own_shard(of.host_parameters);
    of.updated_gradients = of.host_gradients;
    if (!has_master(unit)) of.master = of.updated_parameters;
    return of;
}

Device& ParameterStore::device_of(int unit, Kept kept) const {
    return is_state(unit, kept) || kept == Kept::gradients ? updating_device() : device_;
}

Tensor ParameterStore::held(const UnitBuffers& of, Kept kept) {
    switch (kept) {
        case Kept::whole_parameters:
            return of.parameters;
        case Kept::parameters:
            return of.updated_parameters;
        case Kept::gradients:
            return of.updated_gradients;
        case Kept::master:
            return of.master;
        case Kept::state1:
        case Kept::state2:
            return of.state[number_of(kept)].values;
    }
    programming_error("an unknown kind of elements");
}

Tensor ParameterStore::held(int unit, Kept kept) const {
    return held(kept == Kept::gradients ? operands(unit) : buffers(unit), kept);
}

Tensor ParameterStore::on_disk(int unit) const {
    if (sharding_.offload.has_own_memory) return buffers(unit).host_parameters;
    return on_device(unit);
}
Tensor ParameterStore::on_device(int unit) const {
    return sharding_.keeps_parameters_whole() ? buffers(unit).parameters : buffers(unit).parameter_shard;
}

int ParameterStore::begin_read_parameters(int unit) const {
    const Tensor to = on_disk(unit);
    return file_->begin_read(*parameter_places_[static_cast<std::size_t>(unit)], to.data,
                             whole_blocks(to.bytes()));
}

int ParameterStore::begin_write_parameters(int unit) const {
    const Tensor from = on_disk(unit);
    return file_->begin_write(*parameter_places_[static_cast<std::size_t>(unit)], from.data,
                              whole_blocks(from.bytes()));
}

void ParameterStore::fetch_parameters(int unit) const {
    if (!are_offloaded(unit)) return;
    if (parameter_places_[static_cast<std::size_t>(unit)]) file_->wait(begin_read_parameters(unit));
    if (sharding_.offload.has_own_memory) device_.upload(on_device(unit), buffers(unit).host_parameters.data);
    device_.synchronize();
}

// Copies what is in the device's buffer to all other places that keep it.
void ParameterStore::store_parameters(int unit) const {
    const Tensor& on_host = buffers(unit).host_parameters;
    if (on_host.data != nullptr)
        device_.download(on_host.data,
                         are_offloaded(unit) ? on_device(unit) : buffers(unit).updated_parameters);
    if (parameter_places_[static_cast<std::size_t>(unit)]) file_->wait(begin_write_parameters(unit));
}

UnitBuffers ParameterStore::in_buffer(int unit, int piece, int buffer) const {
    const UnitBuffers whole = operands(unit);
    const StatePiece& of = pieces(unit)[static_cast<std::size_t>(piece)];
    const PieceBytes bytes = dtypes_.piece_bytes(of.elements());
    std::byte* const memory = piece_buffers_[static_cast<std::size_t>(buffer)].data;
    UnitBuffers made{};
    made.updated_parameters = whole.updated_parameters.flat(of.begin, of.elements());
    if (whole.updated_gradients.elements() > 0)
        made.updated_gradients = whole.updated_gradients.flat(of.begin, of.elements());
    made.master = has_master(unit) ? Tensor{memory, DType::fp32, {of.elements()}} : made.updated_parameters;
    for (std::size_t i = 0; i < optimizer().state.size(); ++i)
        made.state[i].values = {memory + bytes.state(i), dtypes_.moments, {of.elements()}};
    return made;
}

UnitBuffers ParameterStore::operands(const UnitBuffers& of_unit, const UpdateGroup& group) {
    const auto part = [&](const Tensor& flat, std::int64_t first) {
        return flat.elements() > 0 ? flat.flat(first, group.range.size()) : flat;
    };
    UnitBuffers of = of_unit;
    of.updated_parameters = part(of_unit.updated_parameters, group.range.begin);
    of.updated_gradients = part(of_unit.updated_gradients, group.range.begin);
    of.master = part(of_unit.master, group.range.begin);
    for (std::size_t i = 0; i < most_states; ++i) {
        // State in 8 bits is of one group.
        if (i >= group.optimizer->state.size()) of.state[i] = {};
        if (of.state[i].values && of.state[i].values.dtype != DType::uint8)
            of.state[i] = {part(of_unit.state[i].values, group.in_state[i])};
    }
    return of;
}

std::vector<UpdateGroup> ParameterStore::groups(int unit, const StatePiece& piece) const {
    std::vector<UpdateGroup> of_piece;
    for (const UpdateGroup& group : groups(unit)) {
        UpdateGroup& made =
            of_piece.emplace_back(UpdateGroup{group.optimizer, {0, piece.elements()}, {}, {}});
        for (UpdateSegment segment : group.segments) {
            const ElementRange part = intersection({segment.begin, segment.end}, {piece.begin, piece.end});
            if (part.size() == 0) continue;
            segment.begin = part.begin - piece.begin;
            segment.end = part.end - piece.begin;
            made.segments.push_back(segment);
        }
    }
    return of_piece;
}

Tensor ParameterStore::directions_of_rank(int unit) const {
    return directions_.directions.flat(layout(unit).ranks().rank * elements(unit), elements(unit));
}
Tensor ParameterStore::own_directions(int unit) const {
    const ElementRange own = updated(unit);
    return directions_of_rank(unit).flat(own.begin, own.size());
}

void ParameterStore::require_finished() const {
    check(!update_is_pending_,
          "an update is pending: Trainer::finish_update() comes before state is read or set");
}

void ParameterStore::transfer_part(int unit, int piece, Kept kept, const ElementRange& part,
                                   bool writes) const {
    const StatePiece& of = pieces(unit)[static_cast<std::size_t>(piece)];
    const bool is_master = kept == Kept::master;
    const std::uint64_t place = is_master ? 0 : dtypes_.piece_bytes(of.elements()).state(number_of(kept)),
                        size = size_of(is_master ? DType::fp32 : dtypes_.moments),
                        block = ScratchFile::alignment,
                        first = static_cast<std::uint64_t>(part.begin) * size / block * block,
                        bytes = whole_blocks(static_cast<std::uint64_t>(part.end) * size) - first;
    std::byte* const memory = piece_buffers_[beside_step].data + place + first;
    file_->wait(writes ? file_->begin_write(of.place + place + first, memory, bytes)
                       : file_->begin_read(of.place + place + first, memory, bytes));
}

template <class F>
void ParameterStore::for_each_piece(int unit, Kept kept, const ElementRange& run, bool writes,
                                    const F& f) const {
    for (int piece = 0; piece < std::ssize(pieces(unit)); ++piece) {
        const StatePiece& of = pieces(unit)[static_cast<std::size_t>(piece)];
        const ElementRange part = intersection(run, {of.begin, of.end});
        if (part.size() == 0) continue;
        const ElementRange in_piece{part.begin - of.begin, part.end - of.begin};
        if (!writes) transfer_part(unit, piece, kept, in_piece, false);
        f(part, held(in_buffer(unit, piece, static_cast<int>(beside_step)), kept)
                    .flat(in_piece.begin, in_piece.size()));
        if (writes) transfer_part(unit, piece, kept, in_piece, true);
    }
}

std::int64_t ParameterStore::window(int unit) const {
    // A whole number of blocks of 8 bits, and of blocks on the disk, in which pieces begin at multiples of a power of
    // two. Parameters that are kept elsewhere too are copied there as a whole.
    constexpr std::int64_t most = std::int64_t{1} << 20;
    const bool is_whole = are_offloaded(unit) || buffers(unit).host_parameters.data != nullptr;
    return is_whole ? updated(unit).size() : most;
}

DType ParameterStore::dtype_in_files(int unit, Kept kept) const {
    const DType dtype =
        is_on_disk(unit, kept) && is_of_optimizer(kept) ? dtypes_.moments : held(unit, kept).dtype;
    return (is_on_disk(unit, kept) && kept == Kept::master) || dtype == DType::uint8 ? DType::fp32 : dtype;
}

namespace {

// The values of a part of a run.
template <class T>
std::span<T> values_of(std::span<T> values, const ElementRange& run, const ElementRange& part) {
    return values.subspan(static_cast<std::size_t>(part.begin - run.begin),
                          static_cast<std::size_t>(part.size()));
}

}  // namespace

void ParameterStore::set_weights(int unit, const ElementRange& window, std::span<const float> values) {
    require_finished();
    const UnitBuffers& own = buffers(unit);
    check(std::ssize(values) == window.size(), "as many weights as the window has");
    if (is_nf4(unit)) return set_nf4(unit, window, values);
    if (is_state_on_disk() && has_master(unit)) {
        for_each_piece(unit, Kept::master, window, true, [&](const ElementRange& part, const Tensor& master) {
            upload_rounded(updating_device(), master, values_of(values, window, part));
        });
    } else if (has_master(unit)) {
        upload_rounded(updating_device(), own.master.flat(window.begin, window.size()), values);
    }
    upload_rounded(device_, own.updated_parameters.flat(window.begin, window.size()), values);
    store_parameters(unit);
}

// Windows are whole blocks, since shards are.
void ParameterStore::set_nf4(int unit, const ElementRange& window, std::span<const float> values) const {
    std::vector<std::byte> blocks(static_cast<std::size_t>(nf4_bytes(window.size())));
#pragma omp parallel for
    for (std::int64_t block = 0; block < window.size() / nf4_block; ++block)
        to_nf4(&blocks[static_cast<std::size_t>(block * nf4_block_bytes)],
               std::span<const float, nf4_block>(&values[static_cast<std::size_t>(block * nf4_block)],
                                                 nf4_block));
    device_.upload(buffers(unit).updated_parameters.flat(nf4_bytes(window.begin), std::ssize(blocks)),
                   blocks.data());
    store_parameters(unit);
}

// As training reads them: rounded to the compute dtype.
void ParameterStore::read_nf4(int unit, const ElementRange& run, std::span<float> values) const {
    require_finished();
    fetch_parameters(unit);
    check(run.begin % nf4_block == 0 && run.size() % nf4_block == 0,
          "weights in 4 bits are read in whole blocks");
    std::vector<std::byte> blocks(static_cast<std::size_t>(nf4_bytes(run.size())));
    device_.download(blocks.data(),
                     buffers(unit).updated_parameters.flat(nf4_bytes(run.begin), std::ssize(blocks)));
    with_dtype(dtype(), [&](auto element) {
        using X = decltype(element);
#pragma omp parallel for
        for (std::int64_t block = 0; block < run.size() / nf4_block; ++block) {
            const std::span<float, nf4_block> of(&values[static_cast<std::size_t>(block * nf4_block)],
                                                 nf4_block);
            from_nf4(of, &blocks[static_cast<std::size_t>(block * nf4_block_bytes)]);
            for (float& x : of) x = to_float(from_float<X>(x));
        }
    });
}

template <class F>
void ParameterStore::for_each_run_of_state(int unit, Kept kept, const ElementRange& run, const F& f) const {
    const std::size_t number = number_of(kept);
    for (const UpdateGroup& group : groups(unit)) {
        const ElementRange part = intersection(run, group.range);
        if (number < group.optimizer->state.size() && part.size() > 0)
            f(part, state(unit, kept)
                        .values.flat(group.in_state[number] + part.begin - group.range.begin, part.size()));
    }
}

template <class F>
void ParameterStore::for_each_part(int unit, Kept kept, const ElementRange& run, const F& f) const {
    require_finished();
    if (is_on_disk(unit, kept)) return for_each_piece(unit, kept, run, false, f);
    if (is_of_parameters(unit, kept)) fetch_parameters(unit);
    if (is_of_optimizer(kept)) return for_each_run_of_state(unit, kept, run, f);
    f(run, held(unit, kept).flat(run.begin, run.size()));
}

void ParameterStore::read(int unit, Kept kept, const ElementRange& run, std::span<float> values) const {
    if (is_in_8_bits(unit, kept)) return read_8_bits(unit, kept, run, values);
    if (is_nf4(unit)) return read_nf4(unit, run, values);
    if (is_of_optimizer(kept)) std::ranges::fill(values, 0.0F);
    for_each_part(unit, kept, run, [&](const ElementRange& part, const Tensor& of) {
        download_widened(device_of(unit, kept), values_of(values, run, part), of);
    });
}

void ParameterStore::read_stored(int unit, Kept kept, const ElementRange& run,
                                 std::span<std::byte> bytes) const {
    const std::size_t size = size_of(dtype_in_files(unit, kept));
    check(bytes.size() == static_cast<std::size_t>(run.size()) * size, "as many bytes as the run has");
    if (is_in_8_bits(unit, kept)) {
        return read_8_bits(unit, kept, run,
                           {reinterpret_cast<float*>(bytes.data()), static_cast<std::size_t>(run.size())});
    }
    for_each_part(unit, kept, run, [&](const ElementRange& part, const Tensor& of) {
        device_of(unit, kept).download(&bytes[static_cast<std::size_t>(part.begin - run.begin) * size], of);
    });
}

void ParameterStore::read_8_bits(int unit, Kept kept, const ElementRange& run,
                                 std::span<float> values) const {
    require_finished();
    const UpdateState& of = state(unit, kept);
    // Whole blocks.
    const std::int64_t first = run.begin / eight_bit_block,
                       blocks = (run.end + eight_bit_block - 1) / eight_bit_block - first;
    std::vector<std::uint8_t> entries(static_cast<std::size_t>(blocks * eight_bit_block));
    std::vector<float> greatest(static_cast<std::size_t>(blocks)), widened(entries.size());
    device_.download(entries.data(), of.values.flat(first * eight_bit_block, blocks * eight_bit_block));
    device_.download(greatest.data(), of.amax.flat(first, blocks));
    for (std::size_t block = 0; block < greatest.size(); ++block)
        from_8_bits(std::span(widened).subspan(block * eight_bit_block, eight_bit_block),
                    &entries[block * eight_bit_block], greatest[block], table(kept));
    std::copy_n(widened.begin() + (run.begin - first * eight_bit_block), run.size(), values.begin());
    for (const UpdateSegment& segment : groups(unit).front().segments) {
        const ElementRange part = intersection(run, {segment.begin, segment.end});
        if (segment.in_packed >= 0 && part.size() > 0)
            download_widened(device_, values_of(values, run, part),
                             of.packed.flat(segment.in_packed + part.begin - segment.begin, part.size()));
    }
}

void ParameterStore::for_each_held(int unit, Kept kept, const ElementRange& part,
                                   const std::function<void(Device&, const Tensor&)>& f) const {
    require_finished();
    const auto give = [&](const Tensor& tensor) { f(device_of(unit, kept), tensor); };
    if (is_on_disk(unit, kept))
        return for_each_piece(unit, kept, part, false,
                              [&](const ElementRange&, const Tensor& of) { give(of); });
    if (is_of_parameters(unit, kept)) fetch_parameters(unit);
    if (is_of_optimizer(kept) && !is_in_8_bits(unit, kept)) {
        return for_each_run_of_state(unit, kept, part,
                                     [&](const ElementRange&, const Tensor& of) { give(of); });
    }
    const auto place = [&](std::int64_t number) { return is_nf4(unit) ? nf4_bytes(number) : number; };
    const Tensor elements = held(unit, kept).flat(place(part.begin), place(part.end) - place(part.begin));
    if (!is_in_8_bits(unit, kept)) return give(elements);
    const UpdateState& of = state(unit, kept);
    for (const UpdateSegment& segment : groups(unit).front().segments) {
        if (segment.in_packed >= 0 && segment.begin <= part.begin && part.end <= segment.end)
            return give(of.packed.flat(segment.in_packed + part.begin - segment.begin, part.size()));
    }
    const std::int64_t first = part.begin / eight_bit_block,
                       end = (part.end + eight_bit_block - 1) / eight_bit_block;
    give(elements);
    give(of.amax.flat(first, end - first));
}

void ParameterStore::set_state(int unit, Kept kept, const ElementRange& window,
                               std::span<const float> values) const {
    require_finished();
    if (is_on_disk(unit, kept)) {
        return for_each_piece(unit, kept, window, true, [&](const ElementRange& part, const Tensor& of) {
            upload_rounded(updating_device(), of, values_of(values, window, part));
        });
    }
    const UpdateState& of = state(unit, kept);
    if (!is_in_8_bits(unit, kept)) {
        return for_each_run_of_state(unit, kept, window, [&](const ElementRange& part, const Tensor& to) {
            upload_rounded(updating_device(), to, values_of(values, window, part));
        });
    }
    std::vector<float> large(values.begin(), values.end());
    for (const UpdateSegment& segment : groups(unit).front().segments) {
        const ElementRange part = intersection(window, {segment.begin, segment.end});
        if (segment.in_packed < 0 || part.size() == 0) continue;
        const std::span<float> small = values_of(std::span(large), window, part);
        device_.upload(of.packed.flat(segment.in_packed + part.begin - segment.begin, part.size()),
                       small.data());
        std::ranges::fill(small, 0.0F);
    }
    std::vector<std::uint8_t> entries(values.size());
    std::vector<float> greatest(values.size() / eight_bit_block);
    for (std::size_t block = 0; block < greatest.size(); ++block)
        greatest[block] =
            to_8_bits(&entries[block * eight_bit_block],
                      std::span(large).subspan(block * eight_bit_block, eight_bit_block), table(kept));
    device_.upload(of.values.flat(window.begin, window.size()), entries.data());
    device_.upload(of.amax.flat(window.begin / eight_bit_block, std::ssize(greatest)), greatest.data());
}

void ParameterStore::round_stochastically(std::uint64_t seed, std::int64_t step) {
    require_finished();
    std::vector<float> weights;
    std::vector<bfloat16> rounded;
    const auto round = [&](const Tensor& parameters, const Tensor& master, std::int64_t first) {
        check(parameters.dtype == DType::bf16, "stochastic rounding is to bf16");
        const std::int64_t elements = master.elements();
        weights.resize(static_cast<std::size_t>(elements));
        rounded.resize(weights.size());
        updating_device().download(weights.data(), master);
        llmc::round_stochastically(rounded.data(), weights.data(), 0, elements,
                                   {.seed = seed, .first_element = first}, step);
        device_.upload(parameters, rounded.data());
    };
    for (int unit = 0; unit < units(); ++unit) {
        if (!has(unit) || is_frozen(unit)) continue;
        if (is_on_disk(unit, Kept::master)) {
            const ElementRange all{0, updated(unit).size()};
            for_each_piece(unit, Kept::master, all, false,
                           [&](const ElementRange& part, const Tensor& master) {
                               round(buffers(unit).updated_parameters.flat(part.begin, part.size()), master,
                                     first_element(unit) + part.begin);
                           });
        } else {
            round(buffers(unit).updated_parameters, buffers(unit).master, first_element(unit));
        }
        store_parameters(unit);
    }
}

void ParameterStore::initialize(std::uint64_t seed, bool trained_only) {
    std::vector<float> values;
    for (int unit = 0; unit < units(); ++unit) {
        if (!has(unit) || (trained_only && is_frozen(unit))) continue;
        const ElementRange own = updated(unit);
        values.resize(static_cast<std::size_t>(own.size()));
        initialize_unit(values, own.begin, layout(unit), seed);
        set_weights(unit, values);
    }
}

}  // namespace llmc
