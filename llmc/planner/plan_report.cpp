#include "llmc/planner/plan_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <ranges>
#include <string>
#include <utility>

#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/io/checkpoint.h"
#include "llmc/plan/pipeline_estimate.h"
#include "llmc/planner/best_meshes.h"
#include "llmc/planner/links.h"
#include "llmc/train/pipeline_report.h"
#include "llmc/train/report.h"

namespace llmc {

namespace {

const RunSpec& spec_of(const PlannedRun& run) { return run.needs->spec; }

std::string machines_text(const PlannedRun& run) {
    const PlannedMachines& machines = run.machines;
    const std::string on = machines.nodes == 1 ? "1 machine" : plural(machines.nodes, "machine");
    if (!machines.gpu)
        return fmt::format("CPUs, {}; {} of memory on each", on, human_bytes(machines.host_bytes));
    const int last = run.processes - (machines.nodes - 1) * machines.ranks_of_node;
    return fmt::format("{}, {:.4g} GiB of memory; {}, {}{} on each{}", machines.gpu->name, machines.gpu->gib,
                       on, plural(machines.ranks_of_node, "GPU"),
                       machines.host_bytes > 0
                           ? fmt::format(" and {} of host memory", human_bytes(machines.host_bytes))
                           : "",
                       last < machines.ranks_of_node ? fmt::format(" ({} on the last)", last) : "");
}

std::string verdict_text(const PlannedRun& run) {
    const std::size_t bytes = run.needs->largest_memory();
    const std::string of = fmt::format(
        "{} of {}", human_bytes(bytes),
        run.machines.gpu ? fmt::format("{}, which is a GPU less {} GiB for CUDA's context and NCCL",
                                       human_bytes(run.machines.usable), run.asked.reserve())
                         : fmt::format("{} a process", human_bytes(run.machines.usable)));
    switch (run.verdict) {
        case Verdict::fits:
            return "yes: " + of;
        case Verdict::tight:
            return "tight, within the last GiB: " + of;
        default:
            return bytes > run.machines.usable ? "no: " + of : "no, what is offloaded does not: " + of;
    }
}

// What nvidia-smi will show, about.
std::string beside_text(const PlannedRun& run) {
    const BesideArenas beside = *run.beside();
    return fmt::format("CUDA's context about {}, libraries {}{}; nvidia-smi will show about {}",
                       human_bytes(beside.context), human_bytes(beside.libraries),
                       beside.nccl > 0 ? ", NCCL " + human_bytes(beside.nccl) : "",
                       human_bytes(run.needs->largest_memory() + beside.total()));
}

std::string part_name(const RunPlan& plan, int part) {
    const Outline::OutlinedPart& outlined = plan.outline->part(part);
    return outlined.is_layer()       ? fmt::format("layer {}", outlined.layer)
           : outlined.makes_losses() ? "the head"
                                     : "the embedding";
}

}  // namespace

std::string action_text(const RunPlan& plan, std::size_t number) {
    const Action& action = plan.training.actions[number];
    std::string text(name_of(action.kind));
    if (action.part >= 0) text += " of " + part_name(plan, action.part);
    if (action.micro_batch >= 0) text += fmt::format(", micro-batch {}", action.micro_batch);
    return text;
}

namespace {

std::string peak_text(const PlannedRun& run) {
    const std::size_t arena = run.fullest->memory.bytes(ArenaKind::activations);
    return fmt::format("{} of {} of activations are in use at most: at action {} of {}, {}",
                       human_bytes(run.peak->bytes), human_bytes(arena), run.peak->action,
                       run.fullest->training.actions.size(), action_text(*run.fullest, run.peak->action));
}

std::string batch_text(const PlannedRun& run) {
    const RunSpec& spec = spec_of(run);
    const std::int64_t micro_batch = run.needs->micro_batch;
    return fmt::format("{} tokens = {} x {} x {} x {} tokens", grouped(spec.global_batch_tokens),
                       plural(spec.mesh.data_ranks(), "data-parallel rank"),
                       plural(spec.rank_sequences() / micro_batch, "micro-batch", "es"),
                       plural(micro_batch, "sequence"), spec.model.sequence_length);
}

std::string checkpoint_text(const Model& model, const Options& options) {
    const SavedBytes bytes = saved_bytes(outline_of(model), options.store_dtypes());
    const bool are_adapters = options.has_adapters() && options.merge.empty();
    return fmt::format("{} with weights and moments; an export in fp32 {}", human_bytes(bytes.checkpoint),
                       human_bytes(are_adapters ? bytes.adapters : bytes.weights));
}

std::string rule_text(const Rule& rule) {
    const bool is_memory = rule.rule == memory_rule || rule.rule == host_rule || rule.rule == disk_rule;
    const auto count = [&](std::int64_t value) { return is_memory ? human_bytes(value) : grouped(value); };
    return fmt::format("{}: {} against {}{}{}", rule.rule, count(rule.value), count(rule.limit),
                       rule.change.empty() ? "; nothing is known that mends it" : "; add " + rule.change,
                       changes_numbers(rule.change) ? ", which changes the numbers of the training" : "");
}

// "14 GB of weights + 14 of gradients + 56 of optimizer = 84 GB"
std::string state_text(const StateGb& state) {
    return fmt::format(
        "{:.4g} GB of weights + {:.4g} of gradients + {:.4g} of optimizer{} = {:.5g} GB", state.weights,
        state.gradients, state.optimizer,
        state.activations > 0 ? fmt::format(" + {:.4g} of activations", state.activations) : "",
        state.total());
}

// "; 560 GB in the host's memory of a machine, which lacks 48 GB". Empty if nothing is offloaded there.
std::string place_text(const ConventionalMemory::Place& place, std::string_view where) {
    if (place.gb == 0) return "";
    std::string text = fmt::format("; {:.5g} GB {} of a machine", place.gb, where);
    if (const auto left = place.left_gb)
        text += fmt::format(", which {} {:.5g} GB", *left < 0 ? "lacks" : "leaves", std::abs(*left));
    return text;
}

// Empty if no convention was asked for and the plan itself knows the bytes.
std::string convention_text(const PlannedRun& run) {
    if (run.asked.convention == "ours" && run.asked.activations == "none" && run.model) return "";
    if (run.asked.convention == "accelerate") {
        const auto row = [&](const char* name, bool is_fp16) {
            const AccelerateRow of = accelerate_row(run.accelerate_bytes(), is_fp16);
            return fmt::format("{}: model {:.2f} MiB, gradients {:.2f}, backward {:.2f}, step {:.2f}", name,
                               of.model, of.gradients, of.backward, of.step);
        };
        return fmt::format("{}; {}", row("fp32", false), row("fp16", true));
    }
    const std::optional<ConventionalMemory> memory = run.convention();
    if (!memory) return "";
    std::string text = state_text(memory->whole);
    if (const auto bytes = run.activation_bytes_of_layer())
        text += fmt::format(", with {} of activations a layer", human_bytes(*bytes));
    const bool has_places = memory->host.gb + memory->disk.gb > 0;
    if (run.mesh->world() > 1 || has_places)
        text +=
            fmt::format("; on each of {} {}", plural(run.mesh->world(), "GPU"), state_text(memory->per_gpu));
    if (memory->divided_gb > 0)
        text += fmt::format("; the divided parts alone {:.5g} GB", memory->divided_gb);
    if (run.machines.gpu) {
        text += fmt::format("; {} {:.5g} GB", memory->left_gb >= 0 ? "leaves" : "exceeds the GPU by",
                            std::abs(memory->left_gb));
        if (memory->least_gpus > 0)
            text += fmt::format("; with ZeRO-3 it takes {} at least", plural(memory->least_gpus, "GPU"));
    }
    return text + place_text(memory->host, "in the host's memory") + place_text(memory->disk, "on the disks");
}

std::string time_text(const PlannedRun& run) {
    const PlannedTime& time = *run.estimate;
    const GpuModel& gpu = *run.machines.gpu;
    const double utilization = *run.flops_per_token() * time.tokens_per_second / run.mesh->world() /
                               gpu.peak(run.spec->dtype, run.options.tf32);
    std::string text = fmt::format("{} a step at least, {} expected", human_seconds(*time.bound),
                                   human_seconds(time.expected));
    if (time.range)
        text += fmt::format(", {} to {} in 80% of {}", human_seconds(time.range->low * time.expected),
                            human_seconds(time.range->high * time.expected), time.range->of);
    const auto largest =
        static_cast<std::size_t>(std::ranges::max_element(time.parts->of) - time.parts->of.begin());
    return text + fmt::format("; {:.0f}% of it {}; {} tokens/s, {} of each GPU, {:.1f}% of its peak{}",
                              100 * time.parts->of[largest] / time.expected,
                              name_of(static_cast<TimePart>(largest)), human_count(time.tokens_per_second),
                              human_count(time.tokens_per_second / run.mesh->world()), 100 * utilization,
                              run.spec->fp8 == Fp8Scaling::none ? "" : " in bf16");
}

// The pipeline of the short plan, with the bubble of the whole step: all times grow evenly with the micro-batches.
TitledTimeline drawn_pipeline(const PlannedRun& run) {
    RunPlan plan = *run.fullest;
    TitledTimeline drawn = estimated_pipeline(plan, std::nullopt);
    const std::int64_t all = run.spec->rank_sequences() / run.needs->micro_batch,
                       more = all - plan.micro_batches, group = ShortStep(plan.spec).group,
                       groups = more / group;
    if (more == 0) return drawn;
    drawn.title += fmt::format(
        ". The picture ends after {} of the step's {} micro-batches, and the bubble is the step's",
        plan.micro_batches, grouped(all));
    plan.pipeline.micro_batches += static_cast<int>(group);
    drawn.timeline.bubble_of_step =
        bubble(drawn.timeline, estimated_timeline(plan, std::nullopt), static_cast<double>(groups));
    return drawn;
}

std::string cost_text(const PlannedRun& run, const Cost& cost) {
    return fmt::format(
        "{} tokens at {:.4g} tokens/s and GPU: {} GPU hours, {:.1f} days{}{}", human_count(*run.asked.tokens),
        run.time()->tokens_per_second / run.mesh->world(), human_count(cost.gpu_hours), cost.days,
        cost.factor > 1 ? fmt::format(", with {:.3g}% for failures and the rest", 100 * (cost.factor - 1))
                        : "",
        cost.dollars ? fmt::format(", ${} at ${:.2f} an hour", human_count(*cost.dollars),
                                   *run.machines.gpu->dollars_an_hour)
                     : "; --price gives the dollars");
}

// "42.1 GiB of 128 GiB in the host's memory, 90 GiB on the disk; a step moves ..." Empty if nothing is offloaded.
// In the host's memory beside a GPU, of the stage that has the most.
std::size_t bytes_of_copy(const RunNeeds& needs) {
    std::size_t bytes = 0;
    for (const StageNeeds& stage : needs.stages)
        bytes = std::max(bytes, stage.host.bytes(ArenaKind::checkpoint));
    return bytes;
}

std::string offload_text(const PlannedRun& run) {
    const RunNeeds& needs = *run.needs;
    const BytesMoved& moved = run.fullest_stage().moved;
    std::vector<std::string> texts;
    const auto add = [&](std::uint64_t bytes, std::size_t usable, std::string_view where) {
        if (bytes > 0)
            texts.push_back(fmt::format("{}{} {}", human_bytes(bytes),
                                        usable > 0 ? " of " + human_bytes(usable) : "", where));
    };
    add(needs.largest_host_memory(), run.machines.usable_host(), "in the host's memory");
    if (const std::size_t copy = bytes_of_copy(needs); copy > 0)
        texts.push_back(
            fmt::format("{} of it for a copy from which checkpoints are written", human_bytes(copy)));
    add(needs.largest_disk(), run.machines.usable_disk(), "on a disk");
    if (moved.to_device + moved.from_device > 0)
        texts.push_back(fmt::format("a step moves {} to the GPU and {} from it", human_bytes(moved.to_device),
                                    human_bytes(moved.from_device)));
    if (moved.read + moved.written > 0)
        texts.push_back(fmt::format("a step reads {} and writes {}", human_bytes(moved.read),
                                    human_bytes(moved.written)));
    return fmt::format("{}", fmt::join(texts, "; "));
}

// Rows in columns, of which the last is text; the first row has the heads.
std::string table(const std::vector<std::vector<std::string>>& rows) {
    std::vector<std::size_t> widths(rows.front().size());
    for (const auto& row : rows)
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    std::string text;
    for (const auto& row : rows) {
        for (std::size_t i = 0; i + 1 < row.size(); ++i) text += fmt::format("  {:>{}}", row[i], widths[i]);
        text += "  " + row.back() + "\n";
    }
    return text + "\n";
}

std::string search_table(const Search& search) {
    const bool has_dollars =
        std::ranges::all_of(search.best, [](const Found& found) { return found.dollars.has_value(); });
    std::vector<std::vector<std::string>> rows = {
        {"tokens/s", "of a GPU", has_dollars ? "$ for 1e9" : "", "memory", "options"}};
    for (const Found& found : search.best)
        rows.push_back({human_count(std::round(found.tokens_per_second)),
                        human_count(std::round(found.tokens_per_second / found.gpus)),
                        has_dollars ? fmt::format("{:.2f}", *found.dollars) : "", human_bytes(found.bytes),
                        found.options});
    return table(rows);
}

std::string levers_table(const std::vector<Lever>& levers) {
    constexpr std::size_t most_rows = 10;
    std::vector<std::vector<std::string>> rows = {{"saves", "costs a step", "fits", "options"}};
    for (const Lever& lever : levers | std::views::take(most_rows))
        rows.push_back({human_bytes(lever.bytes_saved),
                        lever.seconds_lost == 0 ? "-"
                                                : fmt::format("{}{}", lever.seconds_lost < 0 ? "-" : "+",
                                                              human_seconds(std::abs(lever.seconds_lost))),
                        lever.fits ? "yes" : "no", lever.options});
    return table(rows);
}

std::string found_text(const Found& found) {
    return fmt::format("{}: {} tokens/s, {}{}", plural(found.gpus, "GPU"),
                       human_count(std::round(found.tokens_per_second)), human_bytes(found.bytes),
                       found.dollars ? fmt::format(", ${:.2f} for 1e9 tokens", *found.dollars) : "");
}

void add_search(Rows& rows, const PlannedRun& run) {
    const Search& search = *run.search;
    rows.emplace_back("search", fmt::format("{} runs considered, {} simulated", grouped(search.considered),
                                            grouped(search.simulated)));
    if (search.fewest) rows.emplace_back("fewest", found_text(*search.fewest));
    if (search.cheapest) rows.emplace_back("best", found_text(*search.cheapest));
    if (search.in_time) rows.emplace_back("in time", found_text(*search.in_time));
}

void add_levers(Rows& rows, const Levers& levers) {
    rows.emplace_back("largest",
                      levers.micro_batch == 0
                          ? "no micro-batch fits"
                          : fmt::format("micro-batches of {}", plural(levers.micro_batch, "sequence")));
    rows.emplace_back("longest", levers.context == 0
                                     ? "no context fits"
                                     : fmt::format("a context of {} tokens, in micro-batches of 1 sequence",
                                                   grouped(levers.context)));
    if (!levers.first_fit.empty()) rows.emplace_back("would fit", levers.first_fit);
}

}  // namespace

void show(Console& console, const PlannedRun& run) {
    Rows rows = {{"machines", machines_text(run)}};
    if (run.model)
        rows.insert(rows.end(), {{"model", run.model->description},
                                 {"parameters", fmt::format("{}; {:.4g} FLOPs a token, forward and backward",
                                                            parameters_text(*run.model),
                                                            training_flops_per_token(*run.model))}});
    if (run.described)
        rows.insert(
            rows.end(),
            {{"model", fmt::format("{}: {}", run.described->name, run.described->description)},
             {"parameters", fmt::format("{}, of which a token uses {}; {:.4g} FLOPs a token, forward and "
                                        "backward",
                                        grouped(run.described->parameters),
                                        grouped(run.described->active_parameters), *run.flops_per_token())}});
    if (run.asked.parameters) rows.emplace_back("parameters", human_count(*run.asked.parameters));
    if (run.mesh) rows.emplace_back("mesh", run.mesh->description());
    if (run.needs) {
        rows.insert(rows.end(), {{"batch", batch_text(run)},
                                 {"memory", memory_text(*run.mesh, run.needs->stages)},
                                 {"peak", peak_text(run)}});
        if (run.beside()) rows.emplace_back("beside it", beside_text(run));
        rows.emplace_back("fits", verdict_text(run));
        const bool offloads =
            run.needs->largest_disk() > 0 || run.needs->largest_host_memory() > bytes_of_copy(*run.needs);
        if (const std::string text = offload_text(run); !text.empty())
            rows.emplace_back(offloads ? "offload" : "host", text);
        if (const std::string text = sent_text(run.needs->stages); !text.empty()) {
            rows.emplace_back("sends", text);
            rows.emplace_back("over", links_text(*run.mesh, run.machines.ranks_of_node));
        }
        rows.emplace_back("checkpoint", checkpoint_text(*run.model, run.options));
    }
    if (const std::string text = convention_text(run); !text.empty())
        rows.emplace_back("by " + run.asked.convention, text);
    if (run.estimate) rows.emplace_back("time", time_text(run));
    if (const auto cost = run.cost()) rows.emplace_back("cost", cost_text(run, *cost));
    if (run.search) add_search(rows, run);
    if (run.levers) add_levers(rows, *run.levers);
    for (const Rule& rule : run.why_not) rows.emplace_back("why not", rule_text(rule));
    if (!run.command.empty()) rows.emplace_back("start with", run.command);
    console.header(fmt::format("train_gpt {} (commit {}): a plan", version(), commit()), rows);
    if (run.needs && run.mesh->pipeline > 1) {
        const TitledTimeline drawn = drawn_pipeline(run);
        console.chart(drawn.timeline, drawn.title);
    }
    if (run.search && !run.search->best.empty()) console.text("the best runs:\n" + search_table(*run.search));
    if (run.levers && !run.levers->single.empty())
        console.text("each option alone:\n" + levers_table(run.levers->single));
    if (run.levers && !run.levers->pairs.empty())
        console.text("two options:\n" + levers_table(run.levers->pairs));
    for (const std::string& note : run.notes) console.note(note);
}

}  // namespace llmc
