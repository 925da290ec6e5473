#include "llmc/train/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/text.h"
#include "llmc/io/files.h"
#include "llmc/plan/pipeline_estimate.h"
#include "llmc/train/command_line.h"
#include "llmc/train/outputs.h"
#include "llmc/train/pipeline_report.h"
#include "llmc/train/precision.h"
#include "llmc/train/prepared_run.h"

namespace llmc {

namespace {

// The stage with the largest `size`, and the text " of stage 1" for it; the text is empty if all stages are
// equal.
struct LargestStage {
    const StageNeeds& needs;
    std::string name;
};
template <class Size>
LargestStage largest_stage(std::span<const StageNeeds> stages, const Size& size) {
    const auto largest = std::ranges::max_element(stages, {}, size);
    const bool differs =
        std::ranges::any_of(stages, [&](const StageNeeds& stage) { return size(stage) != size(*largest); });
    return {*largest, differs ? fmt::format(" of stage {}", largest - stages.begin()) : ""};
}

}  // namespace

std::string memory_text(const Mesh& mesh, std::span<const StageNeeds> stages,
                        ArenaSizes StageNeeds::*memory) {
    const auto [needs, stage] =
        largest_stage(stages, [&](const StageNeeds& s) { return (s.*memory).total_bytes(); });
    const ArenaSizes& arenas = needs.*memory;
    if (arenas.total_bytes() == 0) return "";
    std::string text = fmt::format("{} per process{}", human_bytes(arenas.total_bytes()), stage);
    if (!stage.empty()) text += ", which needs most";
    if (mesh.world() > 1) {
        std::size_t all = 0;
        for (const StageNeeds& each : stages)
            all += (each.*memory).total_bytes() * static_cast<std::size_t>(mesh.world() / mesh.pipeline);
        text += fmt::format(", {} in all", human_bytes(all));
    }
    text += mesh.world() == 1 ? ":" : stage.empty() ? "; per process:" : "; per process of this stage:";
    std::string_view separator = " ";
    for (const ArenaKind kind : all_arenas) {
        if (arenas.bytes(kind) == 0) continue;
        text += fmt::format("{}{} {}", separator, name_of(kind), human_bytes(arenas.bytes(kind)));
        separator = ", ";
    }
    return text;
}

namespace {

// "1f1b; stages of 2, 1 and 1 layers"; "interleaved; chunks of 1, 1, 1 and 1 layers, 2 per stage"; on a single stage
// "breadth-first; each of 32 layers computes all micro-batches before the next".
std::string pipeline_text(const RunPlan& plan) {
    const PipelineSpec& spec = plan.pipeline;
    if (spec.chunks() == 1) return "";
    if (spec.stages == 1)
        return fmt::format(
            "{}; each of {} computes all micro-batches before the next", schedule_name(plan),
            plural(spec.chunks(), spec.chunks() == plan.spec.model.layers() ? "layer" : "chunk"));
    std::string layers;
    for (int chunk = 0; chunk < spec.chunks(); ++chunk) {
        const bool last = chunk + 1 == spec.chunks();
        layers += fmt::format("{}{}", chunk == 0 ? "" : last ? " and " : ", ", plan.chunk(chunk).layers());
    }
    return spec.virtual_stages == 1 ? fmt::format("{}; stages of {} layers", schedule_name(plan), layers)
                                    : fmt::format("{}; chunks of {} layers, {} per stage",
                                                  schedule_name(plan), layers, spec.virtual_stages);
}

// "embedding, layers 0 to 2, 6, head".
std::string part_text(const StagePart& part) {
    std::vector<std::string> texts;
    if (part.takes_tokens()) texts.emplace_back("embedding");
    std::string_view before = "layers ";
    for (const Chunk& chunk : part.chunks) {
        if (chunk.layers() == 0) continue;
        texts.push_back(chunk.layers() == 1
                            ? fmt::format("{}{}", before, chunk.first_layer)
                            : fmt::format("{}{} to {}", before, chunk.first_layer, chunk.end_layer - 1));
        before = "";
    }
    if (part.makes_losses()) texts.emplace_back("head");
    return fmt::format("{}", fmt::join(texts, ", "));
}

std::string validation_text(const PreparedRun& run) {
    if (!run.data.validation) return run.lack_of_data.empty() ? "none" : "";
    const Options& options = run.options;
    const std::string when = options.val_every == 0
                                 ? "after the last step"
                                 : fmt::format("every {}", plural(options.val_every, "step"));
    const std::string how_much = options.val_batches == 0
                                     ? "on all of it"
                                     : fmt::format("on up to {}", plural(options.val_batches, "batch", "es"));
    return fmt::format("{}; {}, {}", run.data.validation_description, when, how_much);
}

std::string baseline_text(const Data& data) {
    std::string text = fmt::format("a unigram model's loss {:.5f}", *data.unigram_loss);
    if (data.source_entropy) text += fmt::format(", the source's entropy {:.5f}", *data.source_entropy);
    return text + " nats per token";
}

std::string batch_text(const RunPlan& plan) {
    const bool only_data = plan.spec.mesh.world() == plan.spec.mesh.data_ranks();
    return fmt::format(
        "{} tokens = {} x {} x {} x {} tokens", grouped(plan.spec.global_batch_tokens),
        plural(plan.spec.mesh.data_ranks(), only_data ? "process" : "data-parallel process", "es"),
        plural(plan.micro_batches, "micro-batch", "es"), plural(plan.micro_batch, "sequence"),
        plan.spec.model.sequence_length);
}

std::string schedule_text(const PreparedRun& run) {
    const Options& options = run.options;
    const double rate = *options.learning_rate;
    const std::int64_t steps = options.steps > 0 ? options.steps : Options().steps;
    const auto tokens = static_cast<double>(steps) * static_cast<double>(run.plan.spec.global_batch_tokens);
    std::string length = human_count(tokens) + " tokens";
    if (run.data.epoch_tokens > 0)
        length += fmt::format(", {:.2f} epochs", tokens / static_cast<double>(run.data.epoch_tokens));
    const std::string when = options.steps > 0
                                 ? fmt::format("{}, {}", plural(steps, "step"), length)
                                 : fmt::format("0 steps; the default {} would be {}", grouped(steps), length);
    const std::int64_t warmup = *options.warmup_steps;
    if (warmup >= steps) {
        return fmt::format("{}; learning rate rises to {:.6g}, because the run ends within its {} of warmup",
                           when, rate * static_cast<double>(steps) / static_cast<double>(warmup),
                           plural(warmup, "step"));
    }
    // Six digits hide the rounding error of rate * min_lr_fraction.
    const std::string course =
        options.schedule_kind() == ScheduleKind::constant
            ? fmt::format("constant {:.6g}", rate)
            : fmt::format("{} from {:.6g} to {:.6g}", options.schedule, rate, rate * options.min_lr_fraction);
    return fmt::format("{}; learning rate {}, {} of warmup", when, course, plural(warmup, "step"));
}

}  // namespace

std::string sent_text(std::span<const StageNeeds> stages) {
    const auto [needs, stage] = largest_stage(stages, [](const StageNeeds& s) { return s.sent.total(); });
    const BytesSent& sent = needs.sent;
    if (sent.total() == 0) return "";
    std::string text = fmt::format("{} per step and process{}{}", human_bytes(sent.total()), stage,
                                   stage.empty() ? "" : ", which sends most");
    if (sent.inside == sent.total()) return text;
    std::string_view of_total = " of it";
    const auto add = [&](std::uint64_t bytes, std::string_view where) {
        if (bytes == 0) return;
        text += fmt::format(", {}{} {}", human_bytes(bytes), std::exchange(of_total, ""), where);
    };
    add(sent.inside, "within its sharding group");
    add(sent.across, "to other sharding groups");
    add(sent.stages, "to neighbouring stages");
    add(sent.tensor, "to its tensor-parallel group");
    add(sent.tied, "for gradients that stages share");
    return text;
}

std::vector<std::string> offload_without_effect(const Options& options) {
    std::vector<std::string> texts;
    for (const auto& [name, tier] : {std::pair("optimizer", options.offload_optimizer),
                                     std::pair("parameters", options.offload_parameters)})
        if (tier == "cpu")
            texts.push_back(fmt::format(
                "--offload-{} cpu changes nothing: the CPU device's memory is that of the host", name));
    return texts;
}

std::string offload_text(const PreparedRun& run) {
    const Options& options = run.options;
    std::vector<std::string> texts;
    if (!run.device().streams()) texts = offload_without_effect(options);
    const auto [needs, stage] = largest_stage(run.plan.stages, [](const StageNeeds& of) {
        return of.disk + of.moved.read + of.moved.written + of.moved.to_device + of.moved.from_device;
    });
    const BytesMoved& moved = needs.moved;
    if (needs.disk > 0)
        texts.push_back(fmt::format("{} per process in {}", human_bytes(needs.disk), options.nvme_dir));
    if (run.plan.spec.trains && moved.read + moved.written > 0)
        texts.push_back(fmt::format("a step reads {} and writes {}", human_bytes(moved.read),
                                    human_bytes(moved.written)));
    if (run.plan.spec.trains && moved.to_device + moved.from_device > 0)
        texts.push_back(fmt::format("a step moves {} to the GPU and {} from it", human_bytes(moved.to_device),
                                    human_bytes(moved.from_device)));
    if (!stage.empty()) texts.push_back(fmt::format("all this is{}, which moves most", stage));
    if (run.plan.spec.mesh.sharding.offload.has_parameters() && options.sample_tokens == 0 &&
        !options.is_given("sample-tokens"))
        texts.emplace_back("no samples, which --sample-tokens would ask for");
    return fmt::format("{}", fmt::join(texts, "; "));
}

std::string disk_note(const RunPlan& plan, const ScratchFile::Speed& speed) {
    constexpr double endurance = 1200e12;  // bytes, of a common drive of 2 TB
    const auto read = static_cast<double>(plan.moved.read), written = static_cast<double>(plan.moved.written);
    return fmt::format(
        "this process reads {:.1f} GB/s from its disk and writes {:.1f} GB/s: a step takes {} at least; "
        "a drive that may be written 1,200 TB lasts {} steps of a process",
        speed.read / 1e9, speed.written / 1e9,
        human_seconds(std::max(read / speed.read, written / speed.written)),
        grouped(static_cast<std::int64_t>(endurance / std::max(written, 1.0))));
}

namespace {

// "rank 16, scale 2, of q, k, v; base data/smollm2, its layers' matrices in nf4"
std::string adapters_text(const Options& options) {
    if (!options.has_adapters()) return "";
    const AdapterConfig config = options.adapters();
    return fmt::format(
        "rank {}, scale {:.4g}, of {}{}{}", config.rank, config.scale(), fmt::join(config.matrices, ", "),
        options.init.empty() ? "" : fmt::format("; base {}", options.init),
        options.base_dtype.empty() ? "" : fmt::format(", its layers' matrices in {}", options.base_dtype));
}

}  // namespace

Rows header_rows(const PreparedRun& run) {
    const Device& device = run.device();
    const DType dtype = run.plan.spec.dtype;
    const std::string note = device.note(dtype);
    Rows rows = {
        {"device", fmt::format("{}, {}{}{}{}", device.description(), name_of(dtype),
                               run.plan.spec.fp8 == Fp8Scaling::none
                                   ? ""
                                   : fmt::format(", products of blocks in fp8 with {} scaling",
                                                 name_of(run.plan.spec.fp8)),
                               note.empty() ? "" : " (" + note + ")",
                               run.place.note.empty() ? "" : "; no GPU: " + run.place.note)},
        {"precision", precision_text(run.options)},
        {"mesh", run.plan.spec.mesh.description()},
        {"pipeline", pipeline_text(run.plan)},
        {"model", run.plan.spec.model.description},
        {"parameters", parameters_text(run.plan.spec.model)},
        {"adapters", adapters_text(run.options)},
        {"memory", memory_text(run.plan.spec.mesh, run.plan.stages)},
        {"host memory", memory_text(run.plan.spec.mesh, run.plan.stages, &StageNeeds::host)},
        {"offload", offload_text(run)},
        {"beside it", device.memory_beside_arenas(run.ranks->memory)},
        {"sends", sent_text(run.plan.stages)},
        {"algorithms", kind_of_choices(device).empty() ? "" : run.algorithms.row()},
        {"training", run.data.training_description},
        {"too short", run.data.too_short},
        {"validation", validation_text(run)},
    };
    std::erase_if(rows, [](const auto& row) { return row.second.empty(); });
    if (run.data.unigram_loss) rows.emplace_back("baseline", baseline_text(run.data));
    rows.emplace_back("batch", batch_text(run.plan));
    if (run.plan.bytes_of_whole_gradients > 0) {
        rows.emplace_back(
            "gradients",
            fmt::format("not sharded until the step's last micro-batch (--reduce-every step), which "
                        "takes {} more memory",
                        human_bytes(run.plan.bytes_of_whole_gradients)));
    }
    rows.emplace_back("schedule", schedule_text(run));
    if (run.has_work() && (run.writes.checkpoints || run.writes.record))
        rows.emplace_back("results", run.out_dir.string());
    return rows;
}

std::string places_text(const RunPlan& plan) {
    struct Line {
        std::string place, part, memory;
    };
    std::vector<Line> lines;
    std::size_t place_width = 0, part_width = 0, memory_width = 0;
    Mesh mesh = plan.spec.mesh;
    for (mesh.rank = 0; mesh.rank < mesh.world(); ++mesh.rank) {
        const auto stage = static_cast<std::size_t>(mesh.stage());
        lines.push_back({mesh.place(), part_text(plan.parts[stage]),
                         human_bytes(plan.stages[stage].memory.total_bytes())});
        const Line& line = lines.back();
        place_width = std::max(place_width, line.place.size());
        part_width = std::max(part_width, line.part.size());
        memory_width = std::max(memory_width, line.memory.size());
    }
    std::string text;
    for (std::size_t rank = 0; rank < lines.size(); ++rank) {
        const auto& [place, part, memory] = lines[rank];
        text += fmt::format("  process {:>{}}  {:<{}}  {:<{}}  {:>{}}\n", rank,
                            std::to_string(lines.size() - 1).size(), place, place_width, part, part_width,
                            memory, memory_width);
    }
    return text;
}

Rows summary_rows(const PreparedRun& run, const Outcome& outcome) {
    Rows rows;
    if (outcome.stopped) {
        rows.emplace_back("stopped", run.trains
                                         ? fmt::format("after step {} of {}, as requested",
                                                       grouped(outcome.last_step), grouped(run.options.steps))
                                         : "as requested; there was nothing to save");
    }
    if (outcome.best) {
        std::string text = fmt::format("validation loss {} after step {}", fitted(outcome.best->loss, 5, 15),
                                       grouped(outcome.best->step));
        if (run.data.unigram_loss) {
            text += fmt::format(", {:.0f}% of a unigram model's {:.5f}",
                                100 * outcome.best->loss / *run.data.unigram_loss, *run.data.unigram_loss);
        }
        if (run.data.source_entropy) {
            text += fmt::format("; the source's entropy is {:.5f}", *run.data.source_entropy);
        }
        rows.emplace_back("best", text);
    }
    if (outcome.steps > 0) {
        const auto tokens = static_cast<double>(outcome.steps * run.plan.spec.global_batch_tokens);
        const std::string time =
            outcome.seconds < 60 ? fmt::format("{:.1f} s", outcome.seconds) : clock_time(outcome.seconds);
        rows.emplace_back("time", fmt::format("{} for {}: {} tokens/s, including validation and saving", time,
                                              plural(outcome.steps, "step"),
                                              grouped(static_cast<std::int64_t>(tokens / outcome.seconds))));
        if (const std::int64_t skipped = run.trainer->progress().skipped; skipped > 0)
            rows.emplace_back("skipped", fmt::format("{} since the run's start, whose gradients overflowed",
                                                     plural(skipped, "step")));
        if (const StepMetrics::Disk& disk = run.trainer->disk(); disk.ms > 0)
            rows.emplace_back(
                "disk",
                fmt::format(
                    "{}{} read and {} written in {:.1f} s, of which {:.0f}% were hidden behind computing",
                    run.plan.spec.mesh.world() > 1 ? "of process 0: " : "", human_bytes(disk.read_bytes),
                    human_bytes(disk.written_bytes), disk.ms / 1e3,
                    100 * std::max(0.0, 1 - disk.waited_ms / disk.ms)));
        rows.emplace_back("metrics", metrics_file(run.options, run.out_dir).string());
    }
    if (!outcome.checkpoint.empty()) rows.emplace_back("checkpoint", outcome.checkpoint.string());
    if (!outcome.best_checkpoint.empty()) rows.emplace_back("best kept", outcome.best_checkpoint.string());
    if (!run.options.export_file.empty() && !outcome.stopped) {
        rows.emplace_back("exported", run.options.export_file);
    }
    return rows;
}

}  // namespace llmc
