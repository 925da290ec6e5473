// Lays out every unit's parameters, gradients, master weights and optimizer state in the arenas and on the disk. Only
// this decides which of them a rank holds whole and which sharded (sharding.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/ops.h"
#include "llmc/model/units.h"
#include "llmc/optim/formulas.h"
#include "llmc/parallel/zero/sharding.h"
#include "llmc/parallel/zero/state_pieces.h"

namespace llmc {

// The flat buffers of a unit: whole, of padded_elements(ranks) elements, or a rank's shard of that. X is the compute
// dtype. A frozen unit has parameters alone, which may be bytes (stored_parameters).
struct UnitBufferIds {
    BufferId parameters;                      // X, whole
    std::optional<BufferId> parameter_shard;  // X; none: the rank's part of `parameters`
    BufferId gradients;                       // fp32, or X with --gradient-dtype; whole
    std::optional<BufferId> gradient_shard;   // none: the rank's part of `gradients`
    // fp32, the sums to which the backward pass adds. They are `gradients` itself if that is fp32, else the
    // sums of one micro-batch.
    BufferId gradient_sums;
    // fp32, whole or a shard. Without `master`, as in fp32, the parameters serve as master weights.
    std::optional<BufferId> master;
    // UpdateState (ops_update.h). In 8 bits, `packed` has the small tensors of the whole unit on each rank.
    struct State {
        BufferId values, amax, packed;
    };
    std::vector<State> state;  // by the optimizer's tensors of state
    // In the host's memory beside a device: what is offloaded there or passes through, or what the host updates.
    std::optional<BufferId> host_parameters;  // X
    std::optional<BufferId> host_gradients;   // those that this rank updates with
};

struct StoreDtypes {
    DType compute = DType::fp32;
    DType gradients = DType::fp32;                     // or the compute dtype
    DType moments = DType::fp32;                       // or bf16, or uint8: in 8 bits, of layers
    bool has_master = true;                            // if the compute dtype is not fp32
    std::int64_t least_piece = std::int64_t{1} << 20;  // elements of a piece on disk, at least
    OptimizerKind optimizer = OptimizerKind::adamw;

    bool keeps_master() const { return compute != DType::fp32 && has_master; }
    // Moments of tables and of the head stay in fp32 where those of layers are in 8 bits: a token's row has a gradient
    // only where the token occurs, so its moments may be far below those of its neighbors in a block.
    DType moments_of(const Outline::OutlinedUnit& unit) const {
        return moments == DType::uint8 && unit.class_of_layers < 0 ? DType::fp32 : moments;
    }
    PieceBytes piece_bytes(std::int64_t elements) const {
        return {elements, keeps_master(), moments, states()};
    }
    const Optimizer& chosen() const { return llmc::optimizer_of(optimizer); }
    const Optimizer& optimizer_of(const Outline::OutlinedUnit& unit, const ParamSpec& spec) const {
        const bool is_for_others = chosen().others && (unit.class_of_layers < 0 || spec.matrices == 0);
        return is_for_others ? *chosen().others : chosen();
    }
    // Whether a tensor is updated as whole matrices.
    bool has_directions(const Outline::OutlinedUnit& unit, const ParamSpec& spec) const {
        return optimizer_of(unit, spec).others != nullptr;
    }
    bool has_directions(const Outline::OutlinedUnit& unit) const {
        return std::ranges::any_of(unit.spec.params,
                                   [&](const ParamSpec& spec) { return has_directions(unit, spec); });
    }
    DType of_directions() const { return compute == DType::fp16 ? DType::bf16 : compute; }
    // The most tensors of state that a parameter has.
    int states() const { return static_cast<int>(most_states_of(chosen())); }
    // Of an element; with others than the chosen optimizer's, those have at least as many.
    double moment_bytes() const { return static_cast<double>(chosen().state.size() * size_of(moments)); }
};

// A matrix of a product (outputs, inputs), whole.
struct MatrixSizes {
    std::int64_t rows, columns;
    bool operator==(const MatrixSizes&) const = default;
    bool is_tall() const { return rows > columns; }
    std::int64_t fewer() const { return std::min(rows, columns); }
    std::int64_t more() const { return std::max(rows, columns); }
    // Up to a multiple of the blocks of which norms are sums.
    std::int64_t padded_elements() const {
        return (rows * columns + norm_block_elements - 1) / norm_block_elements * norm_block_elements;
    }
};
MatrixSizes matrix_sizes(const ParamSpec& spec);

// What the update of whole matrices needs; B: BufferId or Tensor. D is the compute dtype, or bf16 in place of fp16.
template <class B>
struct DirectionBuffers {
    B directions;       // D (T, elements of a unit), of each tensor-parallel rank
    B own_on_host;      // D: those of this rank, where the host updates
    B matrix, product;  // D (rows, columns) of a matrix, with the fewer rows; whole norm blocks
    B square, squared;  // D (rows, rows)
    B partials, norm;   // of the matrix's norm: fp32, and fp64 (1)
};

struct StoreLayout {
    StoreDtypes dtypes{};
    Sharding sharding{};
    StagePart part{};
    std::vector<UnitLayout> units;       // all units of the model
    std::vector<UnitBufferIds> buffers;  // one per unit, empty for units of other stages
    // State on disk: the pieces of each unit, the bytes of the file, and the buffers of a piece.
    std::vector<std::vector<StatePiece>> pieces{};
    std::uint64_t file_bytes = 0;
    std::vector<BufferId> piece_buffers{};
    // Where the file has a unit's parameters, if they are on disk.
    std::vector<std::optional<std::uint64_t>> parameter_places{};
    // With an optimizer of whole matrices, if the stage has some.
    std::optional<DirectionBuffers<BufferId>> directions{};
};

// Lays out the buffers for one stage's and one tensor-parallel rank's part of the model, and a training step
// of `micro_batches`. Without `trains`, gradients and optimizer state have no elements.
StoreLayout lay_out_store(MemoryLayout& layout, const StoreDtypes& dtypes, const StagePart& part,
                          const Sharding& sharding, int micro_batches, TensorRank tensor = {},
                          bool trains = true);

// Consecutive tensors of a unit with one optimizer: a range of the unit's flat buffer.
struct OptimizerRun {
    const Optimizer* optimizer;
    ElementRange range;
};
std::vector<OptimizerRun> optimizer_runs(const UnitLayout& unit, const Outline::OutlinedUnit& outlined,
                                         const StoreDtypes& dtypes, int ranks);
// Whether a tensor of state has only the elements of those runs whose optimizer has it, one behind the other. Otherwise
// it has all elements of the unit.
bool is_packed(std::span<const OptimizerRun> runs, std::size_t state);

// With state in 8 bits: whether a tensor keeps its state in fp32, and where each such tensor begins among those of
// its unit, in quads; then their number of elements.
bool is_small(const UnitLayout::Entry& entry);
std::vector<std::int64_t> places_of_small(const UnitLayout& unit);

}  // namespace llmc
