#include "llmc/planner/plan_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ranges>
#include <string>
#include <utility>

#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/io/checkpoint.h"
#include "llmc/plan/pipeline_estimate.h"
#include "llmc/planner/links.h"
#include "llmc/train/pipeline_report.h"
#include "llmc/train/records.h"
#include "llmc/train/report.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;

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
        run.machines.gpu ? fmt::format("{}, which is a GPU less 1 GiB for CUDA's context and NCCL",
                                       human_bytes(run.machines.usable))
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

std::string action_text(const RunPlan& plan, std::size_t number) {
    const Action& action = plan.training.actions[number];
    std::string text(name_of(action.kind));
    if (action.part >= 0) text += " of " + part_name(plan, action.part);
    if (action.micro_batch >= 0) text += fmt::format(", micro-batch {}", action.micro_batch);
    return text;
}

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

std::string checkpoint_text(const Model& model) {
    return fmt::format("{} with weights and moments; an export in fp32 {}",
                       human_bytes(checkpoint_bytes(count_parameters(model))),
                       human_bytes(weights_bytes(count_parameters(model))));
}

std::string rule_text(const Rule& rule) {
    const bool is_memory = rule.rule == memory_rule || rule.rule == host_rule || rule.rule == disk_rule;
    const auto count = [&](std::int64_t value) { return is_memory ? human_bytes(value) : grouped(value); };
    return fmt::format("{}: {} against {}{}", rule.rule, count(rule.value), count(rule.limit),
                       rule.change.empty() ? "" : "; add " + rule.change);
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
        text += fmt::format(", {} to {} by 80% of {}", human_seconds(time.range->low * time.expected),
                            human_seconds(time.range->high * time.expected), time.range->of);
    const auto largest =
        static_cast<std::size_t>(std::ranges::max_element(time.parts->of) - time.parts->of.begin());
    return text + fmt::format("; {:.0f}% are {}; {} tokens/s, {} of each GPU, {:.1f}% of its peak{}",
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

Json rule_json(const Rule& rule) {
    return {{"rule", rule.rule},
            {"value", rule.value},
            {"limit", rule.limit},
            {"change", rule.change.empty() ? Json() : Json(rule.change)}};
}

Json model_json(const PlannedRun& run) {
    const auto or_null = [](const std::optional<double>& value) { return value ? Json(*value) : Json(); };
    Json parameters = static_cast<std::int64_t>(run.parameters()), active = parameters;
    if (run.described) active = run.described->active_parameters;
    if (run.asked.parameters) active = nullptr;
    if (run.parameters() == 0) parameters = active = nullptr;
    Json json = {{"parameters", parameters},
                 {"active_parameters", active},
                 {"flops_per_token", or_null(run.flops_per_token())}};
    if (run.model) {
        const ModelChoices choices = run.options.choices_of_model();
        for (const auto& [key, option] : {std::pair("layers", "layers"),
                                          {"channels", "channels"},
                                          {"sequence_length", "seq-len"},
                                          {"vocabulary", "vocab-size"}})
            json[key] = choices.size(option);
    }
    return json;
}

Json state_json(const StateGb& state) {
    return {{"weights_gb", state.weights},
            {"gradients_gb", state.gradients},
            {"optimizer_gb", state.optimizer},
            {"activations_gb", state.activations},
            {"total_gb", state.total()}};
}

Json row_json(const AccelerateRow& row) {
    return {{"model_mib", row.model},
            {"gradients_mib", row.gradients},
            {"backward_mib", row.backward},
            {"step_mib", row.step}};
}

Json convention_json(const PlannedRun& run) {
    if (run.parameters() == 0) return nullptr;
    if (run.asked.convention == "accelerate") {
        const double bytes = run.accelerate_bytes();
        return {{"name", "accelerate"},
                {"accelerate",
                 {{"fp32", row_json(accelerate_row(bytes, false))},
                  {"fp16", row_json(accelerate_row(bytes, true))}}}};
    }
    const std::optional<ConventionalMemory> memory = run.convention();
    if (!memory) return nullptr;
    Json json = {{"name", run.asked.convention}};
    json.update(state_json(memory->whole));
    json["per_gpu"] = state_json(memory->per_gpu);
    json["per_gpu"]["parameters"] = run.parameters() / (run.mesh->pipeline * run.mesh->tensor);
    json["per_gpu"]["divided_gb"] = memory->divided_gb;
    const auto or_null = [](const std::optional<double>& value) { return value ? Json(*value) : Json(); };
    json["activation_bytes_of_layer"] = or_null(run.activation_bytes_of_layer());
    for (const auto& [name, place] : {std::pair("host", memory->host), {"disk", memory->disk}})
        json[name] = {{"gb", place.gb}, {"left_gb", or_null(place.left_gb)}};
    json["fits"] = run.machines.gpu ? Json(memory->fits) : Json();
    json["left_gb"] = run.machines.gpu ? Json(memory->left_gb) : Json();
    json["least_gpus"] = memory->least_gpus > 0 ? Json(memory->least_gpus) : Json();
    return json;
}

std::string_view key_of(TimePart part) {
    return name_among(part, "products", "attention", "other_operations", "tensor_exchanges", "recomputation",
                      "update", "waits_for_data_exchanges", "waits_for_stages", "waits_for_host",
                      "waits_for_disk");
}

Json time_json(const PlannedRun& run) {
    const std::optional<PlannedTime> time = run.time();
    if (!time) return nullptr;
    Json parts;
    for (std::size_t i = 0; time->parts && i < time_parts; ++i)
        parts[key_of(static_cast<TimePart>(i))] = time->parts->of[i];
    const auto at = [&](double PublishedRange::*share) {
        return time->range ? Json(*time->range.*share * time->expected) : Json();
    };
    return {{"bound_seconds", time->bound ? Json(*time->bound) : Json()},
            {"expected_seconds", time->expected > 0 ? Json(time->expected) : Json()},
            {"low_seconds", at(&PublishedRange::low)},
            {"high_seconds", at(&PublishedRange::high)},
            {"range_of", time->range ? Json(time->range->of) : Json()},
            {"tokens_per_second", time->tokens_per_second},
            {"parts", parts}};
}

Json cost_json(const PlannedRun& run) {
    const std::optional<Cost> cost = run.cost();
    if (!cost) return nullptr;
    return {{"gpu_hours", cost->gpu_hours},
            {"days", cost->days},
            {"usd", cost->dollars ? Json(*cost->dollars) : Json()},
            {"factor", cost->factor}};
}

Json batch_json(const PlannedRun& run) {
    if (!run.spec) return nullptr;
    Json json = {{"tokens", run.spec->global_batch_tokens}};
    if (!run.needs) return json;
    json["micro_batch_sequences"] = run.needs->micro_batch;
    json["micro_batches"] = run.spec->rank_sequences() / run.needs->micro_batch;
    return json;
}

Json memory_json(const PlannedRun& run) {
    if (!run.needs) return nullptr;
    const StageNeeds& stage = run.fullest_stage();
    Json json = {{"bytes", stage.memory.total_bytes()},
                 {"arenas", memory_record(stage.memory)},
                 {"stage", run.needs->fullest_stage()},
                 {"usable", run.machines.usable},
                 {"fits", run.verdict == Verdict::fits || run.verdict == Verdict::tight},
                 {"verdict", name_of(run.verdict)},
                 {"beside", nullptr},
                 {"peak",
                  {{"action", action_text(*run.fullest, run.peak->action)},
                   {"number", run.peak->action},
                   {"activation_bytes", run.peak->bytes}}}};
    if (const auto beside = run.beside())
        json["beside"] = {{"context", beside->context},
                          {"libraries", beside->libraries},
                          {"nccl", beside->nccl},
                          {"nvidia_smi", stage.memory.total_bytes() + beside->total()}};
    return json;
}

// What is offloaded to the host or a disk by one rank, of the stage that offloads most.
Json beside_json(std::uint64_t bytes, std::size_t usable) {
    return {{"bytes", bytes}, {"usable", usable > 0 ? Json(usable) : Json()}};
}

// On the stage that needs most of the device's memory.
Json moved_json(const PlannedRun& run) {
    Json json = offload_record(run.fullest_stage());
    json.erase("host");
    json.erase("disk");
    return json;
}

// "42.1 GiB of 128 GiB in the host's memory, 90 GiB on the disk; a step moves ..." Empty if nothing is offloaded.
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
    add(needs.largest_disk(), run.machines.usable_disk(), "on a disk");
    if (moved.to_device + moved.from_device > 0)
        texts.push_back(fmt::format("a step moves {} to the GPU and {} from it", human_bytes(moved.to_device),
                                    human_bytes(moved.from_device)));
    if (moved.read + moved.written > 0)
        texts.push_back(fmt::format("a step reads {} and writes {}", human_bytes(moved.read),
                                    human_bytes(moved.written)));
    return fmt::format("{}", fmt::join(texts, "; "));
}

Json sends_json(const PlannedRun& run) {
    if (!run.needs) return nullptr;
    const auto& stages = run.needs->stages;
    const auto most =
        std::ranges::max_element(stages, {}, [](const StageNeeds& s) { return s.sent.total(); });
    Json json = sent_record(most->sent);
    json["bytes"] = most->sent.total();
    json["stage"] = most - stages.begin();
    const Links links(*run.mesh, run.machines.ranks_of_node);
    json["links"] = {{"inside", name_of(links.inside)},
                     {"across", name_of(links.across)},
                     {"tied", name_of(links.stages)},
                     {"stages", name_of(links.stages)},
                     {"tensor", name_of(links.tensor)}};
    return json;
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

Json levers_json(const PlannedRun& run) {
    if (!run.levers) return nullptr;
    const auto list = [&](const std::vector<Lever>& levers) {
        Json json = Json::array();
        for (const Lever& lever : levers)
            json.push_back({{"options", lever.options},
                            {"bytes_saved", lever.bytes_saved},
                            {"seconds_lost", run.estimate ? Json(lever.seconds_lost) : Json()},
                            {"fits", lever.fits}});
        return json;
    };
    const auto or_null = [](std::int64_t number) { return number > 0 ? Json(number) : Json(); };
    return {{"micro_batch_sequences", or_null(run.levers->micro_batch)},
            {"context", or_null(run.levers->context)},
            {"single", list(run.levers->single)},
            {"pairs", list(run.levers->pairs)},
            {"first_fit", run.levers->first_fit.empty() ? Json() : Json(run.levers->first_fit)}};
}

Json found_json(const Found& found) {
    return {{"options", found.options},
            {"gpus", found.gpus},
            {"tokens_per_second", found.tokens_per_second},
            {"bytes", found.bytes},
            {"usd_per_billion_tokens", found.dollars ? Json(*found.dollars) : Json()}};
}

Json search_json(const PlannedRun& run) {
    if (!run.search) return nullptr;
    const Search& search = *run.search;
    const auto or_null = [](const std::optional<Found>& found) {
        return found ? found_json(*found) : Json();
    };
    Json json = {{"considered", search.considered}, {"simulated", search.simulated}, {"best", Json::array()}};
    for (const Found& found : search.best) json["best"].push_back(found_json(found));
    json["fewest"] = or_null(search.fewest);
    json["cheapest"] = or_null(search.cheapest);
    json["in_time"] = or_null(search.in_time);
    return json;
}

}  // namespace

Json to_json(const PlannedRun& run) {
    Json json = {{"model", model_json(run)}, {"mesh", nullptr}};
    if (run.mesh) {
        json["mesh"] = mesh_record(*run.mesh);
        json["mesh"]["processes"] = run.mesh->world();
    }
    json["batch"] = batch_json(run);
    json["memory"] = memory_json(run);
    json["host"] =
        run.needs ? beside_json(run.needs->largest_host_memory(), run.machines.usable_host()) : Json();
    json["disk"] = run.needs ? beside_json(run.needs->largest_disk(), run.machines.usable_disk()) : Json();
    json["moved"] = run.needs ? moved_json(run) : Json();
    json["sends"] = sends_json(run);
    json["time"] = time_json(run);
    json["cost"] = cost_json(run);
    json["convention"] = convention_json(run);
    json["why_not"] = Json::array();
    for (const Rule& rule : run.why_not) json["why_not"].push_back(rule_json(rule));
    json["levers"] = levers_json(run);
    json["search"] = search_json(run);
    json["command"] = run.command.empty() ? Json() : Json(run.command);
    return json;
}

void show(Console& console, const PlannedRun& run) {
    Rows rows = {{"machines", machines_text(run)}};
    if (run.model)
        rows.insert(rows.end(), {{"model", run.model->description},
                                 {"parameters", fmt::format("{}; {:.4g} FLOPs a token, forward and backward",
                                                            grouped(count_parameters(*run.model)),
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
        if (const std::string text = offload_text(run); !text.empty()) rows.emplace_back("offload", text);
        if (const std::string text = sent_text(run.needs->stages); !text.empty()) {
            rows.emplace_back("sends", text);
            rows.emplace_back("over", links_text(*run.mesh, run.machines.ranks_of_node));
        }
        rows.emplace_back("checkpoint", checkpoint_text(*run.model));
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
