#include "llmc/train/adapter_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/adapter_files.h"
#include "llmc/model/low_rank.h"
#include "llmc/train/command_line.h"
#include "llmc/train/settings.h"

namespace llmc {

namespace {

// The matrices of --lora-layers, in the order of `adaptable`.
std::vector<std::string> matrices_of(const std::string& list) {
    if (list == "all") return {adaptable.begin(), adaptable.end()};
    std::set<std::string_view> chosen;
    for (std::size_t begin = 0; begin <= list.size();) {
        const std::size_t end = std::min(list.find(',', begin), list.size());
        const std::string_view matrix = std::string_view(list).substr(begin, end - begin);
        if (std::ranges::find(adaptable, matrix) == adaptable.end())
            user_error("--lora-layers: {} is no matrix of a layer; give some of {}, or all",
                       in_quotes(std::string(matrix)), fmt::join(adaptable, ","));
        chosen.insert(matrix);
        begin = end + 1;
    }
    std::vector<std::string> matrices;
    for (const std::string_view matrix : adaptable)
        if (chosen.contains(matrix)) matrices.emplace_back(matrix);
    return matrices;
}

}  // namespace

void resolve_adapters(Options& o) {
    if (!o.has_adapters()) return;
    const std::vector<std::string> matrices = matrices_of(o.lora_layers);
    o.lora_layers = matrices.size() == adaptable.size() ? "all" : fmt::format("{}", fmt::join(matrices, ","));
}

void check_adapters(const Options& o) {
    if (!o.has_adapters()) {
        if (!o.merge.empty())
            user_error("--merge is for adapters; give --lora-rank or --lora, or leave it out");
        return;
    }
    require_range<std::int64_t>("lora-rank", *o.lora_rank, 1, most_adapter_rank);
    require_range("lora-alpha", o.lora_alpha, least_alpha, greatest_alpha);
    if (!o.base_dtype.empty() && o.fp8 != "none")
        user_error(
            "--base-dtype nf4 and --fp8 {} both say how products read the base's matrices; leave one out",
            o.fp8);
    if (o.optimizer_used().others)
        user_error(
            "--optimizer {} updates whole matrices of the layers, which adapters leave as they are; leave it "
            "out",
            o.optimizer);
    if (!o.export_file.empty() && o.merge.empty()) {
        if (std::filesystem::path(o.export_file).extension() == ".safetensors")
            user_error("--export: an adapter is a folder; give a name without .safetensors, or --merge");
        if (!o.export_dtype.empty())
            user_error("--export-dtype: adapters are exported in fp32; leave it out, or give --merge");
    }
}

AdapterConfig Options::adapters() const {
    return {.rank = lora_rank.value(),
            .alpha = lora_alpha,
            .rslora = lora_rslora,
            .matrices = matrices_of(lora_layers)};
}

Model adapted(Model model, const Options& options) {
    if (!options.has_adapters()) return model;
    const AdapterConfig config = options.adapters();
    naming_option("--lora-rank", [&] {
        model =
            with_adapters(model, {.rank = config.rank, .scale = config.scale(), .matrices = config.matrices});
    });
    return options.base_dtype.empty() ? model : with_nf4(model, static_cast<int>(options.tensor_parallel));
}

// The adapter's settings come from its folder.
void take_adapter(Options& o, const Sources& sources) {
    for (const char* const name : {"lora-rank", "lora-alpha", "lora-rslora", "lora-layers"}) {
        if (o.is_given(name)) user_error("--lora has its own --{}; leave one of them out", name);
    }
    const AdapterConfig& config = sources.adapter->config;
    const bool was_nf4 = config.base_dtype == "nf4", is_nf4 = o.base_dtype == "nf4";
    if (!config.base_dtype.empty() && was_nf4 != is_nf4) {
        const std::string found =
                              fmt::format("{} was trained beside a base in {}", o.lora, config.base_dtype),
                          remedy = was_nf4 ? "give --base-dtype nf4" : "leave --base-dtype out";
        if (o.steps == 0 && o.merge == "trained")
            user_error("--merge: {}, which this run does not have; {}, or --merge original", found, remedy);
        o.notes.push_back(fmt::format("{}; {} for the same", found, remedy));
    }
    o.lora_rank = config.rank;
    o.lora_alpha = config.alpha;
    o.lora_rslora = config.rslora;
    o.lora_layers = fmt::format("{}", fmt::join(config.matrices, ","));
    o.base_checksum = config.base_checksum;
    o.dtype_of_base = config.base_dtype;
    o.init = sources.base;
    o.notes.insert(o.notes.end(), sources.adapter->notes.begin(), sources.adapter->notes.end());
}

// The configuration goes on naming the adapter from which the run began.
void take_base(Options& options, const Sources& sources, const nlohmann::ordered_json& then) {
    const std::string began = then.contains("lora") && then["lora"].is_string() ? then["lora"] : "";
    if (!options.lora.empty() && options.lora != began)
        options.notes.push_back(
            fmt::format("--lora {} is ignored: the checkpoint has its own adapters", options.lora));
    options.lora = options.steps > 0 && sources.given_then.contains("lora") ? began : "";
    if (!options.lora.empty()) options.inherited["lora"] = true;
    options.init = sources.base;
}

void take_adapters(Options& options, const Sources& sources) {
    const CheckpointInfo& checkpoint = *sources.checkpoint;
    if (!checkpoint.base) return;
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    options.lora_rank = then.at("lora-rank").get<std::int64_t>();
    options.lora_alpha = then.at("lora-alpha");
    options.lora_rslora = then.at("lora-rslora");
    options.lora_layers = then.at("lora-layers");
    if (then.contains("base-dtype") && then["base-dtype"].is_string())
        options.base_dtype = then["base-dtype"];
    take_base(options, sources, then);
}

void require_same_adapters(const CheckpointInfo& checkpoint, const Options& options,
                           const nlohmann::ordered_json& then, const nlohmann::ordered_json& now) {
    const std::string given = checkpoint.directory.string();
    if (options.has_adapters() && !checkpoint.base)
        user_error(
            "{} has no adapters; leave --lora-rank out, or adapt its weights in a new run with --init {}",
            given, shell_word(given));
    for (const char* const name : {"lora-rank", "lora-alpha", "lora-rslora", "lora-layers", "base-dtype"}) {
        if (checkpoint.base && then[name] != now[name])
            user_error("{} has adapters {}, and this run's is {}; leave it out", given,
                       then[name].is_null() ? fmt::format("without --{}", name)
                                            : fmt::format("with --{} {}", name, then[name].dump()),
                       now[name].dump());
    }
}

std::string exported_adapter_config(const Options& options) {
    AdapterConfig config = options.adapters();
    config.base = options.weights.empty() ? "" : std::filesystem::absolute(options.weights).string();
    return adapter_config_text(config);
}

}  // namespace llmc
