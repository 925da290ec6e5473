// Where every unit's parameters, gradients, master weights and moments lie. Today (ZeRO stage 0) each rank
// keeps all of them whole; lay_out_store is the one place that decides it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/arenas.h"
#include "llmc/device/ops.h"
#include "llmc/model/units.h"

namespace llmc {

// The flat buffers of a unit, each of padded_elements(ranks) elements.
template <class Buffer>
struct UnitBuffers {
    Buffer parameters;  // X
    Buffer gradients;   // fp32, or X if --gradient-dtype says so
    // fp32, what the backward pass adds to: the same buffer as `gradients` if those are fp32, else of one micro-batch
    // (one buffer for all blocks: step.h).
    Buffer gradient_sums;
    Buffer master;  // fp32; the same buffer as `parameters` if X is fp32
    Buffer m, v;    // fp32, AdamW's moments
};

struct StoreDtypes {
    DType compute = DType::fp32;
    DType gradients = DType::fp32;  // or the compute dtype
};

struct StoreLayout {
    DType dtype = DType::fp32;
    int ranks = 1;
    std::vector<UnitLayout> units;
    std::vector<UnitBuffers<BufferId>> buffers;  // one a unit
};

StoreLayout lay_out_store(MemoryLayout& layout, const GPTConfig& config, const StoreDtypes& dtypes,
                          int ranks);

class ParameterStore {
  public:
    // `weight_decay` applies to the tensors whose ParamSpec decays.
    ParameterStore(Device& device, const Arenas& arenas, const StoreLayout& layout, double weight_decay);

    int units() const { return static_cast<int>(layouts_.size()); }
    DType dtype() const { return dtype_; }
    std::span<const UnitLayout> layouts() const { return layouts_; }
    const UnitLayout& layout(int unit) const { return layouts_[static_cast<std::size_t>(unit)]; }
    const UnitBuffers<Tensor>& buffers(int unit) const { return buffers_[static_cast<std::size_t>(unit)]; }
    std::span<const AdamWSegment> segments(int unit) const {
        return segments_[static_cast<std::size_t>(unit)];
    }

    // The place of a unit's first element in the whole model, which no number of ranks changes.
    std::int64_t first_element(int unit) const;

    // A rank's shard of a flat buffer of this store.
    Tensor shard(const Tensor& flat, int rank) const;

    // The unit's weights, its whole flat buffer in fp32, from the host: into the master copy, and rounded
    // into the parameters.
    void set_weights(int unit, std::span<const float> values);
    // The parameters as AdamW's stochastic rounding left them after a step, from the master copy.
    void round_stochastically(std::uint64_t seed, std::int64_t step);
    // Initial weights, the same on every mesh.
    void initialize(std::uint64_t seed);

  private:
    Device& device_;
    DType dtype_;
    int ranks_;
    std::vector<UnitLayout> layouts_;
    std::vector<UnitBuffers<Tensor>> buffers_;
    std::vector<std::vector<AdamWSegment>> segments_;
};

}  // namespace llmc
