#include "llmc/train/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/train/command_line.h"

namespace llmc {

namespace {

// The named model that has these sizes, if there is one.
std::string model_text(const GPTConfig& config) {
    const auto named = std::ranges::find(named_models(), config, &NamedModel::config);
    return fmt::format("{}{}, {}, {} channels, context {}, vocabulary {}",
                       named == named_models().end() ? "" : fmt::format("{}: ", named->name),
                       plural(config.layers, "layer"), plural(config.heads, "head"), config.channels,
                       config.sequence_length, config.vocabulary);
}

std::string memory_text(const MemoryLayout& memory, int processes) {
    std::string text = fmt::format("{} a process", human_bytes(memory.total_bytes()));
    if (processes > 1) {
        text += fmt::format(", {} in all",
                            human_bytes(memory.total_bytes() * static_cast<std::size_t>(processes)));
    }
    text += processes > 1 ? "; of each:" : ":";
    std::string_view separator = " ";
    for (const ArenaKind kind : all_arenas) {
        if (memory.bytes(kind) == 0) continue;
        text += fmt::format("{}{} {}", separator, name_of(kind), human_bytes(memory.bytes(kind)));
        separator = ", ";
    }
    return text;
}

std::string validation_text(const Run& run) {
    if (!run.data.validation) return "none";
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
    if (data.source_entropy) text += fmt::format(", the source's own entropy {:.5f}", *data.source_entropy);
    return text + " nats per token";
}

std::string sent_text(const RunPlan& plan) {
    if (plan.spec.mesh.data_ranks() == 1) return "";
    const std::size_t inside = plan.sent.inside, across = plan.sent.across;
    std::string text = fmt::format("{} a step and process", human_bytes(inside + across));
    if (across > 0)
        text += fmt::format(", {} of it in its group, {} to other groups", human_bytes(inside),
                            human_bytes(across));
    return text;
}

nlohmann::ordered_json mesh_record(const Mesh& mesh) {
    return {{"world", mesh.world()},
            {"data", mesh.data_ranks()},
            {"zero_stage", mesh.sharding.stage},
            {"shards", mesh.sharding.shards},
            {"replicas", mesh.sharding.replicas}};
}

std::string batch_text(const RunPlan& plan) {
    return fmt::format("{} tokens = {} x {} x {} x {} tokens", grouped(plan.spec.global_batch_tokens),
                       plural(plan.spec.mesh.data_ranks(), "process", "es"),
                       plural(plan.micro_batches, "micro-batch", "es"), plural(plan.micro_batch, "sequence"),
                       plan.spec.config.sequence_length);
}

std::string schedule_text(const Run& run) {
    const Options& options = run.options;
    const double rate = *options.learning_rate;
    const std::int64_t steps = options.steps > 0 ? options.steps : Options().steps;
    const auto tokens = static_cast<double>(steps) * static_cast<double>(run.plan.spec.global_batch_tokens);
    const double epochs = tokens / static_cast<double>(run.data.training->tokens());
    const std::string length = fmt::format("{} tokens, {:.2f} epochs", human_count(tokens), epochs);
    const std::string when = options.steps > 0
                                 ? fmt::format("{}, {}", plural(steps, "step"), length)
                                 : fmt::format("0 steps; the default {} would be {}", grouped(steps), length);
    const std::int64_t warmup = *options.warmup_steps;
    if (warmup >= steps) {
        return fmt::format("{}; learning rate rises to {:.6g}: the run ends within its {} of warmup", when,
                           rate * static_cast<double>(steps) / static_cast<double>(warmup),
                           plural(warmup, "step"));
    }
    // With the digits that a person may have given: a product of decimals has more.
    const std::string course =
        options.schedule_kind() == ScheduleKind::constant
            ? fmt::format("constant {:.6g}", rate)
            : fmt::format("{} from {:.6g} to {:.6g}", options.schedule, rate, rate * options.min_lr_fraction);
    return fmt::format("{}; learning rate {}, {} of warmup", when, course, plural(warmup, "step"));
}

std::string command_to_resume(const Run& run) {
    return fmt::format("{} --config {} --out-dir {} --resume", run.program,
                       shell_word((run.out_dir / "config.toml").string()), shell_word(run.out_dir.string()));
}

}  // namespace

std::string command_to_export(const Run& run, const Outcome& outcome) {
    if (outcome.checkpoint.empty()) return "";
    return fmt::format("{} {} --steps 0 --export {}", command_to_resume(run),
                       shell_word(outcome.checkpoint.string()), shell_word(run.options.export_file));
}

std::string command_to_go_on(const Run& run, const Outcome& outcome) {
    if (outcome.checkpoint.empty() || (outcome.stopped && !run.trains)) return "";
    std::string command = command_to_resume(run);
    if (outcome.last_step >= run.options.steps && !outcome.stopped) {
        command += fmt::format(" --steps {}", 2 * outcome.last_step);
    }
    return command;
}

Rows header_rows(const Run& run, const Device& device) {
    const DType dtype = run.plan.spec.dtype;
    const std::string note = device.note(dtype);
    Rows rows = {
        {"device", fmt::format("{}, {}{}{}", device.description(), name_of(dtype),
                               note.empty() ? "" : " (" + note + ")",
                               run.no_gpu.empty() ? "" : "; no GPU: " + run.no_gpu)},
        {"mesh", run.plan.spec.mesh.description()},
        {"model", model_text(run.plan.spec.config)},
        {"parameters", grouped(count_parameters(run.plan.spec.config))},
        {"memory", memory_text(run.plan.memory, run.plan.spec.mesh.world())},
        {"beside it", device.memory_beside_arenas(run.communicator_memory)},
        {"sends", sent_text(run.plan)},
        {"algorithms", kind_of_choices(device).empty() ? "" : run.algorithms.row()},
        {"training", run.data.training_description},
        {"validation", validation_text(run)},
    };
    std::erase_if(rows, [](const auto& row) { return row.second.empty(); });
    if (run.data.unigram_loss) rows.emplace_back("baseline", baseline_text(run.data));
    rows.emplace_back("batch", batch_text(run.plan));
    if (run.plan.bytes_of_whole_gradients > 0) {
        rows.emplace_back("gradients",
                          fmt::format("whole until the step's last micro-batch (--reduce-every step), which "
                                      "takes {} more than shards of them",
                                      human_bytes(run.plan.bytes_of_whole_gradients)));
    }
    rows.emplace_back("schedule", schedule_text(run));
    if (run.writes.checkpoints || run.writes.record) rows.emplace_back("results", run.out_dir.string());
    return rows;
}

nlohmann::ordered_json run_record(const Run& run, const Device& device) {
    nlohmann::ordered_json record = {
        {"program", "train_gpt"},
        {"version", version()},
        {"commit", commit()},
        {"identity", run.lineage},
        {"configuration", to_json(run.options)},
        {"device", device.description()},
        {"mesh", mesh_record(run.plan.spec.mesh)},
        {"parameters", count_parameters(run.plan.spec.config)},
        {"micro_batch_sequences", run.plan.micro_batch},
        {"micro_batches", run.plan.micro_batches},
        {"bytes_sent", {{"inside", run.plan.sent.inside}, {"across", run.plan.sent.across}}},
    };
    for (const ArenaKind kind : all_arenas)
        record["memory"][std::string(name_of(kind))] = run.plan.memory.bytes(kind);
    if (run.data.unigram_loss) record["unigram_loss"] = *run.data.unigram_loss;
    if (run.data.source_entropy) record["source_entropy"] = *run.data.source_entropy;
    return record;
}

Rows summary_rows(const Run& run, const Outcome& outcome) {
    Rows rows;
    if (outcome.stopped) {
        rows.emplace_back("stopped", run.trains
                                         ? fmt::format("after step {} of {}, as asked",
                                                       grouped(outcome.last_step), grouped(run.options.steps))
                                         : "as asked; there was nothing to save");
    }
    if (outcome.best_loss) {
        std::string text = fmt::format("validation loss {} after step {}", fitted(*outcome.best_loss, 5, 15),
                                       grouped(outcome.best_step));
        if (run.data.unigram_loss) {
            text += fmt::format(", {:.0f}% of a unigram model's {:.5f}",
                                100 * *outcome.best_loss / *run.data.unigram_loss, *run.data.unigram_loss);
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
        rows.emplace_back("time", fmt::format("{} for {}: {} tokens/s, validation and saving included", time,
                                              plural(outcome.steps, "step"),
                                              grouped(static_cast<std::int64_t>(tokens / outcome.seconds))));
        rows.emplace_back("metrics", metrics_file(run.options, run.out_dir).string());
    }
    if (!outcome.checkpoint.empty()) rows.emplace_back("checkpoint", outcome.checkpoint.string());
    if (!run.options.export_file.empty() && !outcome.stopped) {
        rows.emplace_back("exported", run.options.export_file);
    }
    return rows;
}

}  // namespace llmc
