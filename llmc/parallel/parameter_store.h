// Where every unit's parameters, gradients, master weights and moments lie. lay_out_store is the one place that decides
// which of them a rank has whole and which in shards (sharding.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/arenas.h"
#include "llmc/device/ops.h"
#include "llmc/model/units.h"
#include "llmc/parallel/sharding.h"

namespace llmc {

// The flat buffers of a unit: whole, of padded_elements(ranks) elements, or a rank's shard of that.
struct UnitBufferIds {
    BufferId parameters;                      // X, whole
    std::optional<BufferId> parameter_shard;  // X; none: the rank's part of `parameters`
    BufferId gradients;                       // fp32, or X if --gradient-dtype says so, whole
    std::optional<BufferId> gradient_shard;   // none: the rank's part of `gradients`
    // fp32, what the backward pass adds to: the same buffer as `gradients` if those are fp32, else of one micro-batch.
    BufferId gradient_sums;
    // fp32, whole or a shard. No `master` where X is fp32: the parameters are their own.
    std::optional<BufferId> master;
    BufferId m, v;  // AdamW's moments
};

struct UnitBuffers {
    Tensor parameters, gradients, gradient_sums;  // whole
    Tensor parameter_shard, gradient_shard;
    // What this rank updates: whole where it keeps the optimizer's state whole, else its shard.
    Tensor updated_parameters, updated_gradients, master, m, v;
};

struct StoreDtypes {
    DType compute = DType::fp32;
    DType gradients = DType::fp32;  // or the compute dtype
};

struct StoreLayout {
    DType dtype = DType::fp32;
    Sharding sharding{};
    StagePart part{};
    std::vector<UnitLayout> units;       // of the whole model
    std::vector<UnitBufferIds> buffers;  // one a unit, empty for those of other stages
};

// Of a stage's and a tensor-parallel rank's part of the model, for a training step of so many micro-batches; or without
// gradients and moments, of which there are then no elements.
StoreLayout lay_out_store(MemoryLayout& layout, const StoreDtypes& dtypes, const StagePart& part,
                          const Sharding& sharding, int micro_batches, TensorRank tensor = {},
                          bool trains = true);

// A run of elements of a unit's whole flat buffer.
struct ElementRange {
    std::int64_t begin = 0, end = 0;
    std::int64_t size() const { return end - begin; }
};
// What both have, empty (begin = end) if nothing.
ElementRange intersection(const ElementRange& a, const ElementRange& b);

class ParameterStore {
  public:
    // Of the rank that has this shard. `weight_decay` applies to the tensors whose ParamSpec decays.
    ParameterStore(Device& device, const Arenas& arenas, const StoreLayout& layout, double weight_decay,
                   int shard);

    int units() const { return static_cast<int>(layouts_.size()); }
    DType dtype() const { return dtype_; }
    const Sharding& sharding() const { return sharding_; }
    const StagePart& part() const { return part_; }
    int shard() const { return shard_; }
    // Whether this rank's stage has a unit; of others there are no buffers.
    bool has(int unit) const { return part_.has_unit(unit); }
    std::span<const UnitLayout> layouts() const { return layouts_; }
    const UnitLayout& layout(int unit) const { return layouts_[static_cast<std::size_t>(unit)]; }
    const UnitBuffers& buffers(int unit) const { return buffers_[static_cast<std::size_t>(unit)]; }
    // Of the unit's updated part.
    std::span<const AdamWSegment> segments(int unit) const {
        return segments_[static_cast<std::size_t>(unit)];
    }

    // Elements of a unit's whole flat buffer, and which of them a shard has, or a rank of the stage updates.
    std::int64_t elements(int unit) const { return layout(unit).padded_elements(sharding_.ranks()); }
    ElementRange shard(int unit, int shard) const;
    ElementRange updated(int unit) const;
    // The place of the first element that this rank updates in the whole model, which no number of ranks changes.
    std::int64_t first_element(int unit) const;
    // This rank's part of a flat buffer that is as long, a unit's or one that has a number for every block of it.
    Tensor own_shard(const Tensor& flat) const;

    // The weights that this rank updates, in fp32, from the host: into the master copy, and rounded into the parameters.
    // Whole parameters that others update are not whole yet (build_publication).
    void set_weights(int unit, std::span<const float> values);
    // The parameters as AdamW's stochastic rounding left them after a step, from the master copy; again this rank's.
    void round_stochastically(std::uint64_t seed, std::int64_t step);
    // Initial weights, the same on every mesh; again this rank's.
    void initialize(std::uint64_t seed);

  private:
    Device& device_;
    DType dtype_;
    Sharding sharding_;
    StagePart part_;
    int shard_;
    std::vector<UnitLayout> layouts_;
    std::vector<UnitBuffers> buffers_;
    std::vector<std::vector<AdamWSegment>> segments_;
};

}  // namespace llmc
