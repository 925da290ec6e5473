// The ranks of a mesh as communicators: of each rank, those with whom it shares something.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/step.h"

namespace llmc {

// A way to, or from, another pipeline stage.
struct StageLink {
    std::shared_ptr<Communicator> pair;  // of the two stages; null where nothing goes
    int peer = 0;
};

class MeshGroups {
  public:
    // All ranks make it at once. `world` outlives it. `parts` is what each stage has of the model. With `wraps` the last stage
    // sends to the first (more than one chunk a stage).
    MeshGroups(Communicator& world, const Mesh& mesh, std::span<const StagePart> parts, bool wraps = false);

    // The data-parallel ranks, with the same part of the model: all of them; those that have its state in shards
    // together; those with the same shard (only where there are several groups of these).
    Communicator& data() const { return data_ ? *data_ : world_; }
    Communicator& shards() const { return shards_ ? *shards_ : data(); }
    Communicator& replicas() const { return *replicas_; }

    // The stages, with the same part of the data; of these, those that have a unit which several of them have.
    bool has_stages() const { return stages_ != nullptr; }
    Communicator& stages() const { return *stages_; }
    Communicator& tied(int unit) const;
    const std::map<int, std::shared_ptr<Communicator>>& tied() const { return tied_; }

    // The ranks that share each layer.
    TensorParallel tensor_parallel() const { return tensor_ ? TensorParallel(*tensor_) : TensorParallel(); }

    // Those that share the model, by stages or by layers.
    bool shares_model() const { return has_stages() || tensor_ != nullptr; }
    Communicator& model() const { return model_ ? *model_ : has_stages() ? *stages_ : *tensor_; }

    // What goes between stages is carried by communicators of two, one for each pair, kind and direction, so that nothing
    // waits behind anything else.
    const StageLink& link(ActionKind kind) const;

    // Calls f for each communicator that was made here, in the order in which all ranks made them.
    void for_each(const std::function<void(Communicator&)>& f) const;

  private:
    std::unique_ptr<Communicator> split(Communicator& group, int color, int key);
    void tie_stages(const Mesh& mesh, std::span<const StagePart> parts);
    void link_stages(const Mesh& mesh, bool wraps);

    Communicator& world_;
    std::unique_ptr<Communicator> data_, shards_, replicas_, stages_, tensor_, model_;
    std::map<int, std::shared_ptr<Communicator>> tied_;  // by unit; one of the same stages serves them all
    std::vector<Communicator*> made_;
    StageLink activations_in_, activations_out_, gradients_in_, gradients_out_;
};

}  // namespace llmc
