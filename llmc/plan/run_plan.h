// What a run will do and need, before it does anything: the list of actions and every buffer, as a pure
// function of (model, mesh, options). The trainer allocates what the plan says; the header prints it; they
// cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/data/samples.h"
#include "llmc/device/ops.h"
#include "llmc/model/model.h"
#include "llmc/model/recompute.h"
#include "llmc/parallel/activations.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/parameter_store.h"
#include "llmc/parallel/pipeline_schedule.h"
#include "llmc/parallel/step.h"

namespace llmc {

// What the machine has for the processes of the run that it bears.
struct MachineMemory {
    std::size_t bytes = 0;  // 0: not known
    int processes = 1;
    std::string_view name = "this machine";  // in a message
    bool more_processes_bring_more = false;  // as where each has a GPU of its own
};

struct RunSpec {
    Model model;
    DType dtype = DType::fp32;
    DType gradient_dtype = DType::fp32;  // or `dtype`
    Mesh mesh;
    // Whether gradients are reduced when that is usual at the mesh's stage of ZeRO, or a person said when.
    bool usual_reduction = true;
    PipelineSchedule pipeline_schedule = PipelineSchedule::one_f_one_b;
    int virtual_stages = 1;  // chunks of a pipeline stage
    // Blocks of each chunk, as a person gave them; empty: balanced by their cost.
    std::string pipeline_layers{};
    Recompute recompute{};
    bool trains =
        true;  // otherwise there is no memory for gradients and moments, and no training step is run
    std::int64_t global_batch_tokens = 0;
    std::int64_t micro_batch_sequences = 0;        // 0: as many as divide the batch, fit the memory, and
    std::int64_t usual_micro_batch_tokens = 2048;  // are not more tokens than this
    std::int64_t logits_bytes = 128 << 20;         // at most so many are held, and at least a row
    MachineMemory machine{};

    std::int64_t global_sequences() const { return global_batch_tokens / model.sequence_length; }
    std::int64_t rank_sequences() const { return global_sequences() / mesh.data_ranks(); }
};

// What a rank of a pipeline stage takes.
struct StageNeeds {
    MemoryLayout memory;
    BytesSent sent;
};

struct RunPlan {
    RunSpec spec;
    std::int64_t micro_batch = 1;    // sequences a rank computes at once
    std::int64_t micro_batches = 1;  // of a rank and step
    std::shared_ptr<const Outline> outline;
    std::shared_ptr<const ModelLists> lists;  // of micro-batches
    std::vector<StagePart> parts;             // what each pipeline stage has of the model
    PipelineSpec pipeline;                    // of a training step
    // Of this rank.
    Step training, evaluation, generation;
    Step diagnosis;    // an evaluation of one micro-batch, which leaves all that it computed
    Step publication;  // after weights were set (build_step.h)

    MemoryLayout memory;
    StoreLayout store;
    ActivationBuffers<BufferId> activations;
    BufferId communication;  // the communicator's staging memory
    BufferId workspace;      // the device's scratch memory

    BytesSent sent;                  // by a rank in a training step, for gradients and parameters
    std::vector<StageNeeds> stages;  // of every stage's ranks
    std::size_t largest_memory = 0;  // of the stage that needs most
    // What gradients take that are whole for --reduce-every step, and would be in shards otherwise.
    std::size_t bytes_of_whole_gradients = 0;

    std::int64_t global_sequences() const { return spec.global_sequences(); }
    std::int64_t rank_sequences() const { return spec.rank_sequences(); }
    // What this rank computes of a step.
    BatchShare share() const {
        return {.global_sequences = global_sequences(),
                .data_ranks = spec.mesh.data_ranks(),
                .data_rank = spec.mesh.data_rank(),
                .micro_batch = micro_batch};
    }
    const StagePart& part() const { return parts[static_cast<std::size_t>(spec.mesh.stage())]; }
    // One of the model's chunks, whichever stage has it.
    const Chunk& chunk(int number) const {
        const StagePart& stage = parts[static_cast<std::size_t>(pipeline.stage_of(number))];
        return stage.chunks[static_cast<std::size_t>(number / pipeline.stages)];
    }
    // Sequences of each data rank that a run of the evaluation takes.
    std::int64_t evaluation_sequences() const { return micro_batch * evaluation.micro_batches; }
};

// Of each unit the buffers that ranks exchange.
std::vector<UnitBytes> unit_bytes(const RunSpec& spec, std::span<const UnitLayout> units);

// A plan without memory or lists, which knows what a training step sends (`stages`). Nothing for a step with so many actions that
// it takes long to know. UserError where the options make no step.
std::optional<RunPlan> plan_of_messages(const RunSpec& spec);

// What each stage of a run's pipeline has of the model; nothing where there are no stages, or more layers than any
// plan may have. UserError for chunks that the schedule has not.
std::vector<StagePart> parts_of_pipeline(const RunSpec& spec);

// Refuses with a UserError sizes that make no model, need more memory than the machine has (it names both), or a
// global batch that the mesh cannot share evenly (it names what would do).
// `staging_bytes` is what the communicator asks for.
RunPlan plan_run(const RunSpec& spec, const Ops& ops, std::size_t staging_bytes);

}  // namespace llmc
