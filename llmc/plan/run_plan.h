// The plan of all that a run will do and need, computed before it starts: the list of actions and every
// buffer, as a pure function of (model, mesh, options). The trainer allocates from the plan and the header
// prints it, so they agree.
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
#include "llmc/device/sizes.h"
#include "llmc/model/model.h"
#include "llmc/model/part_lists.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/pipeline/pipeline_schedule.h"
#include "llmc/parallel/step/activations.h"
#include "llmc/parallel/step/step.h"
#include "llmc/parallel/zero/checkpoint_share.h"
#include "llmc/parallel/zero/store_layout.h"

namespace llmc {

// The machine's memory for the run's processes on it.
struct MachineMemory {
    std::size_t bytes = 0;  // 0: unknown
    int processes = 1;
    // Beside a GPU: that of the host, for as many processes as are on the machine. 0: unknown.
    std::size_t host_bytes = 0;
    int host_processes = 1;
    std::string_view name = "this machine";  // for messages
    bool more_processes_bring_more = false;  // as on machines where each process has its own GPU
    bool is_of_cpu = true;                   // of the CPU device, whose runs may keep state on a disk
};

struct RunSpec {
    Model model;
    // The --model whose sizes the user took unchanged; empty if options gave sizes. For messages.
    std::string model_name{};
    DType dtype = DType::fp32;
    DType gradient_dtype = DType::fp32;  // fp32, or the same as `dtype`
    DType moments_dtype = DType::fp32;   // fp32 or bf16, or uint8: in 8 bits
    OptimizerKind optimizer = OptimizerKind::adamw;
    bool has_master = true;             // an fp32 copy of the weights, if `dtype` is not fp32
    Fp8Scaling fp8 = Fp8Scaling::none;  // in bf16: of the blocks' products
    DType fp8_dtype = DType::bf16;      // what they read (DeviceSizes::fp8_dtype)
    std::int64_t least_piece = StoreDtypes().least_piece;
    Mesh mesh;
    // Whether --reduce-every has its default, which depends on the ZeRO stage.
    bool default_reduction = true;
    PipelineSchedule pipeline_schedule = PipelineSchedule::one_f_one_b;
    int virtual_stages = 1;  // chunks per pipeline stage
    // The blocks of each chunk as the user gave them; empty: balanced by cost.
    std::string pipeline_layers{};
    Recompute recompute{};
    bool trains = true;  // otherwise no memory for gradients and moments, and no training steps
    // Whether checkpoints are written from a copy, while training goes on. In the spec of a plan, whether it has room.
    bool copies_checkpoints = false;
    std::int64_t global_batch_tokens = 0;
    std::int64_t micro_batch_sequences = 0;          // 0: the plan chooses
    std::int64_t default_micro_batch_tokens = 2048;  // the most tokens of a micro-batch that the plan chooses
    std::int64_t logits_bytes = 128 << 20;  // the most bytes of logits in memory at once; one row always fits
    MachineMemory machine{};
    // Whether a run that does not fit the machine gets a plan all the same (RunPlan::lack).
    bool may_exceed_machine = false;

    StoreDtypes store_dtypes() const {
        return {dtype, gradient_dtype, moments_dtype, has_master, least_piece, optimizer};
    }
    std::int64_t global_sequences() const { return global_batch_tokens / model.sequence_length; }
    std::int64_t rank_sequences() const { return global_sequences() / mesh.data_ranks(); }
};

// Bytes of what is offloaded that a list moves: from the disk and to it; from the host's memory to the device beside
// it, and back.
struct BytesMoved {
    std::uint64_t read = 0, written = 0, to_device = 0, from_device = 0;
};

// The needs of a rank of one pipeline stage.
struct StageNeeds {
    ArenaSizes memory, host;  // of the device, and of the host beside it
    std::uint64_t disk = 0;   // bytes of the file
    BytesSent sent;           // in a training step
    BytesMoved moved;
};

// What a run needs on every stage, without the lists that it performs.
struct RunNeeds {
    RunSpec spec;
    std::int64_t micro_batch = 1;  // sequences
    std::vector<StageNeeds> stages;

    // The stage that needs the most memory.
    int fullest_stage() const;
    std::size_t largest_memory() const {
        return stages[static_cast<std::size_t>(fullest_stage())].memory.total_bytes();
    }
    std::size_t largest_host_memory() const;
    std::uint64_t largest_disk() const;
    // Bytes of the copy for checkpoints that there is no room for; 0: there is, or none is asked for.
    std::size_t lacking_copy = 0;
};

struct RunPlan {
    RunSpec spec;
    std::int64_t micro_batch = 1;    // sequences that a rank computes at once
    std::int64_t micro_batches = 1;  // per rank and step
    std::shared_ptr<const Outline> outline;
    std::shared_ptr<const ModelLists> lists;  // for micro-batches
    std::vector<StagePart> parts;             // the part of the model on each pipeline stage
    PipelineSpec pipeline;                    // for a training step
    // The lists of actions of this rank.
    Step training, evaluation, generation;
    // The updates of a step that no other follows.
    Step update;
    Step diagnosis;          // evaluates one micro-batch and keeps all that it computed
    Step parameter_gathers;  // runs after weights are set (build_step.h)

    MemoryLayout memory;
    StoreLayout store;
    std::vector<UnitCopyIds> copy;  // if spec.copies_checkpoints
    ActivationBuffers<BufferId> activations;
    BufferId communication;  // the communicator's staging memory
    BufferId workspace;      // the device's scratch memory

    BytesSent sent;                  // by this rank in a training step
    BytesMoved moved;                // in a training step
    std::vector<StageNeeds> stages;  // for the ranks of every stage
    std::size_t largest_memory = 0;  // memory of the stage that needs the most
    // Why the run does not fit the machine, and what would; empty if it fits.
    std::string lack;
    std::size_t lacking_copy = 0;  // RunNeeds
    // The extra bytes of gradients with --reduce-every step, which keeps them unsharded until the last
    // micro-batch.
    std::size_t bytes_of_whole_gradients = 0;

    std::int64_t global_sequences() const { return spec.global_sequences(); }
    std::int64_t rank_sequences() const { return spec.rank_sequences(); }
    // This rank's share of a step's batch.
    BatchShare share() const {
        return {.global_sequences = global_sequences(),
                .data_ranks = spec.mesh.data_ranks(),
                .data_rank = spec.mesh.data_rank(),
                .micro_batch = micro_batch};
    }
    const StagePart& part() const { return parts[static_cast<std::size_t>(spec.mesh.stage())]; }
    // One of the model's chunks, on any stage.
    const Chunk& chunk(int number) const {
        const StagePart& stage = parts[static_cast<std::size_t>(pipeline.stage_of(number))];
        return stage.chunks[static_cast<std::size_t>(number / pipeline.stages)];
    }
    // The sequences of each data rank in one run of the evaluation.
    std::int64_t evaluation_sequences() const { return micro_batch * evaluation.micro_batches; }
};

// The bytes of a copy between host and device, or of a transfer from or to the disk; 0 for other actions.
std::uint64_t bytes_moved(const Action& action, const StoreLayout& store, const MemoryLayout& memory);

// The part of the model on each stage of a run's pipeline. Empty if there is one stage, or if there are more
// layers than any plan may have. UserError for numbers of chunks that the schedule does not support.
std::vector<StagePart> parts_of_pipeline(const RunSpec& spec);

// The needs of a run with micro-batches of `micro_batch` sequences, from short training steps: as many
// micro-batches as the schedule takes to repeat itself. They equal those of the whole plan (plan_run), which
// also makes the lists and checks them. The time grows with layers and stages, but not with micro-batches or
// data-parallel ranks. UserError if the device does not support the sizes, or if there are too many layers.
RunNeeds needs_of(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes,
                  std::int64_t micro_batch);

// The same with the micro-batch that plan_run would choose, and with a copy of checkpoints only if there is room for
// it. UserError if the options make no valid step.
RunNeeds needs_of(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes);

// Finds the needs of runs on one device, whatever memory they take.
class FindNeeds {
  public:
    FindNeeds(const DeviceSizes& sizes, std::size_t staging_bytes)
        : sizes_(sizes), staging_bytes_(staging_bytes) {}
    RunNeeds operator()(const RunSpec& spec, std::int64_t micro_batch) const {
        return needs_of(spec, sizes_, staging_bytes_, micro_batch);
    }
    // The memory of the first stage in a short step. The run needs no less, and most of what does not fit shows here.
    std::size_t least(const RunSpec& spec, std::int64_t micro_batch) const;

  private:
    const DeviceSizes& sizes_;
    std::size_t staging_bytes_;
};

// A step after which a schedule repeats itself: it then adds `group` micro-batches at a time.
struct ShortStep {
    explicit ShortStep(const RunSpec& spec);
    std::int64_t group, few;  // micro-batches
};
// The plan of a stage's ranks for a step of `micro_batches`: its lists and their memory, without checks.
RunPlan short_plan(const RunNeeds& needs, int stage, std::int64_t micro_batches, const DeviceSizes& sizes,
                   std::size_t staging_bytes);

// The plans of all stages for one or two short steps, from which the needs and the time of the whole step follow: those
// of `first`, and what `second` has more, `more` times.
struct ShortPlans {
    std::vector<RunPlan> first, second;  // second: empty if the first step is the whole one
    std::int64_t more = 0;
};
ShortPlans short_plans(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes,
                       std::int64_t micro_batch);
RunNeeds needs_of(const ShortPlans& plans);

// Plans a run. UserError if the sizes are not valid, or if they need more memory than the machine has (the
// message names both). UserError also if the mesh cannot divide the global batch evenly (the message names a
// batch that works).
// `staging_bytes` is the communicator's staging memory.
RunPlan plan_run(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes);

}  // namespace llmc
