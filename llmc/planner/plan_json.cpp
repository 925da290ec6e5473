#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "llmc/core/text.h"
#include "llmc/planner/best_meshes.h"
#include "llmc/planner/links.h"
#include "llmc/planner/plan_report.h"
#include "llmc/train/records.h"
#include "llmc/train/report.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;

Json rule_json(const Rule& rule) {
    return {{"rule", rule.rule},
            {"value", rule.value},
            {"limit", rule.limit},
            {"change", rule.change.empty() ? Json() : Json(rule.change)},
            {"changes_numbers", changes_numbers(rule.change)}};
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

}  // namespace llmc
