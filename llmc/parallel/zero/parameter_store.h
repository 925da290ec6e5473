// Lays out and holds every unit's parameters, gradients, master weights and moments. Only lay_out_store
// decides which of them a rank holds whole and which sharded (sharding.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/device.h"
#include "llmc/device/ops.h"
#include "llmc/model/units.h"
#include "llmc/parallel/zero/sharding.h"

namespace llmc {

// The flat buffers of a unit: whole, of padded_elements(ranks) elements, or a rank's shard of that. X is the
// compute dtype.
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
    BufferId m, v;  // AdamW's moments, fp32 or bf16
};

struct UnitBuffers {
    Tensor parameters, gradients, gradient_sums;  // whole
    Tensor parameter_shard, gradient_shard;
    // The elements that this rank updates: all if it keeps the optimizer state whole, else its shard.
    Tensor updated_parameters, updated_gradients, master, m, v;
};

struct StoreDtypes {
    DType compute = DType::fp32;
    DType gradients = DType::fp32;  // or the compute dtype
    DType moments = DType::fp32;    // or bf16
    bool has_master = true;         // if the compute dtype is not fp32
};

struct StoreLayout {
    StoreDtypes dtypes{};
    Sharding sharding{};
    StagePart part{};
    std::vector<UnitLayout> units;       // all units of the model
    std::vector<UnitBufferIds> buffers;  // one per unit, empty for units of other stages
};

// Lays out the buffers for one stage's and one tensor-parallel rank's part of the model, and a training step
// of `micro_batches`. Without `trains`, gradients and moments have no elements.
StoreLayout lay_out_store(MemoryLayout& layout, const StoreDtypes& dtypes, const StagePart& part,
                          const Sharding& sharding, int micro_batches, TensorRank tensor = {},
                          bool trains = true);

// A run of elements of a unit's whole flat buffer.
struct ElementRange {
    std::int64_t begin = 0, end = 0;
    std::int64_t size() const { return end - begin; }
};
// The elements that both ranges contain; empty (begin = end) if there are none.
ElementRange intersection(const ElementRange& a, const ElementRange& b);

class ParameterStore {
  public:
    // `shard` is this rank's shard. `weight_decay` applies to the tensors whose ParamSpec decays.
    ParameterStore(Device& device, const Arenas& arenas, const StoreLayout& layout, double weight_decay,
                   int shard);

    int units() const { return static_cast<int>(layouts_.size()); }
    DType dtype() const { return dtypes_.compute; }
    DType dtype_of_moments() const { return dtypes_.moments; }
    // Whether master weights are kept beside the parameters.
    bool has_master() const { return dtypes_.compute != DType::fp32 && dtypes_.has_master; }
    const Sharding& sharding() const { return sharding_; }
    const StagePart& part() const { return part_; }
    int shard() const { return shard_; }
    // Whether this rank's stage has a unit. Other units have no buffers.
    bool has(int unit) const { return part_.has_unit(unit); }
    std::span<const UnitLayout> layouts() const { return layouts_; }
    const UnitLayout& layout(int unit) const { return layouts_[static_cast<std::size_t>(unit)]; }
    const UnitBuffers& buffers(int unit) const { return buffers_[static_cast<std::size_t>(unit)]; }
    // The segments of the elements that this rank updates.
    std::span<const AdamWSegment> segments(int unit) const {
        return segments_[static_cast<std::size_t>(unit)];
    }

    // Elements of a unit's whole flat buffer; those in a shard; those that this rank updates.
    std::int64_t elements(int unit) const { return layout(unit).padded_elements(sharding_.ranks()); }
    ElementRange shard(int unit, int shard) const;
    ElementRange updated(int unit) const;
    // The number in the whole model of the first element that this rank updates. An element's number does not
    // depend on the number of data-parallel ranks.
    std::int64_t first_element(int unit) const;
    // This rank's shard of a flat buffer: of a unit's elements, or of one number per norm block of the unit.
    Tensor own_shard(const Tensor& flat) const;

    // Sets the weights that this rank updates from fp32 values on the host: the master weights, and from
    // them, rounded, the parameters. build_parameter_gathers later gathers the elements that other ranks
    // update.
    void set_weights(int unit, std::span<const float> values);
    // Rounds this rank's master weights into its parameters as AdamW's stochastic rounding did after `step`.
    void round_stochastically(std::uint64_t seed, std::int64_t step);
    // Sets this rank's initial weights. They are the same on every mesh.
    void initialize(std::uint64_t seed);

  private:
    Device& device_;
    StoreDtypes dtypes_;
    Sharding sharding_;
    StagePart part_;
    int shard_;
    std::vector<UnitLayout> layouts_;
    std::vector<UnitBuffers> buffers_;
    std::vector<std::vector<AdamWSegment>> segments_;
};

}  // namespace llmc
