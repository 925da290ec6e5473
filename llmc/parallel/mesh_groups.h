// The communicators of a mesh: for each rank, the groups of ranks with which it shares something.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/step/step.h"

namespace llmc {

// A link to, or from, another pipeline stage.
struct StageLink {
    std::shared_ptr<Communicator> pair;  // the communicator of the two stages; null if nothing is sent
    int peer = 0;
};

class MeshGroups {
  public:
    // All ranks must construct it at once. `world` outlives it. `parts` is each stage's part of the model.
    // With `wraps` the last stage sends to the first (more than one chunk per stage).
    MeshGroups(Communicator& world, const Mesh& mesh, std::span<const StagePart> parts, bool wraps = false);

    // `data`: the data-parallel ranks with the same part of the model. `shards`: those of them that together
    // hold one sharded copy of its state. `replicas`: those with the same shard, which exist only if there
    // are several such copies.
    Communicator& data() const { return data_ ? *data_ : world_; }
    Communicator& shards() const { return shards_ ? *shards_ : data(); }
    Communicator& replicas() const { return *replicas_; }

    // `stages`: one rank of each stage, which together process the same data. `tied`: those of them whose
    // stages have the unit, if there are several.
    bool has_stages() const { return stages_ != nullptr; }
    Communicator& stages() const { return *stages_; }
    Communicator& tied(int unit) const;
    const std::map<int, std::shared_ptr<Communicator>>& tied() const { return tied_; }

    // The ranks that share each layer.
    TensorParallel tensor_parallel() const { return tensor_ ? TensorParallel(*tensor_) : TensorParallel(); }

    // The ranks that together hold one copy of the model: all stages and tensor-parallel ranks with the same
    // data-parallel rank.
    bool shares_model() const { return has_stages() || tensor_ != nullptr; }
    Communicator& model() const { return model_ ? *model_ : has_stages() ? *stages_ : *tensor_; }

    // The link for one kind of transfer between stages. Each pair, kind and direction has a communicator of
    // two ranks, so that no transfer waits for another.
    const StageLink& link(ActionKind kind) const;

    // Calls f for each communicator that was made here, in the order in which all ranks made them.
    void for_each(const std::function<void(Communicator&)>& f) const;

  private:
    std::unique_ptr<Communicator> split(Communicator& group, int color, int key, bool only_sends = false);
    void tie_stages(const Mesh& mesh, std::span<const StagePart> parts);
    void link_stages(const Mesh& mesh, bool wraps);

    Communicator& world_;
    std::unique_ptr<Communicator> data_, shards_, replicas_, stages_, tensor_, model_;
    std::map<int, std::shared_ptr<Communicator>> tied_;  // by unit; units on the same stages share one
    std::vector<Communicator*> made_;
    StageLink activations_in_, activations_out_, gradients_in_, gradients_out_;
};

}  // namespace llmc
