// The options that describe models, each once for all families that have it, and what several families derive
// from them.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/model/family.h"

namespace llmc {

namespace {

// Without values: each family has its own.
const std::array all_options = {
    FamilyOption{"layers", "Use N transformer blocks"},
    FamilyOption{"heads", "Use N attention heads", OptionKind::division},
    FamilyOption{"channels", "Use a residual stream of N channels"},
    FamilyOption{"mlp-size", "Use N channels in the MLP of a block"},
    FamilyOption{"seq-len", "Use a context of N tokens"},
    FamilyOption{"vocab-size", "Use a vocabulary of N tokens; 256: bytes"},
    FamilyOption{"kv-heads", "Use N heads of keys, a divisor of --heads; 0: as many", OptionKind::count},
    FamilyOption{"head-size", "Use heads of N elements; 0: --channels / --heads", OptionKind::count},
    FamilyOption{"window", "Attend to the last N tokens only; 0: to all", OptionKind::count},
    FamilyOption{"positions", "Keep a table of N positions, at least --seq-len; 0: as many",
                 OptionKind::count},
    FamilyOption{"rope-theta", "Use X as the base of rotary positions", OptionKind::number, {}, "X"},
    FamilyOption{"rope-scaling",
                 "Scale the frequencies of rotary positions: none, or Llama 3.1's FACTOR,LOW,HIGH,POSITIONS",
                 OptionKind::text,
                 {},
                 "TEXT"},
    FamilyOption{"norm-eps", "Add X to the mean square in norms", OptionKind::number, {}, "X"},
    FamilyOption{"logit-cap", "Cap logits x to X tanh(x/X); 0: no cap", OptionKind::number, {}, "X"},
    FamilyOption{"z-loss",
                 "Add X times the mean square of log-sum-exp to the trained loss",
                 OptionKind::number,
                 {},
                 "X"},
    FamilyOption{"qk-norm",
                 "Normalise queries and keys: not, by head, or over all heads",
                 OptionKind::text,
                 {},
                 "",
                 {"none", "head", "all"}},
    FamilyOption{"norms",
                 "Normalise before attention and the MLP, or behind them",
                 OptionKind::text,
                 {},
                 "",
                 {"before", "behind"}},
    FamilyOption{"bias", "Use biases in layernorms and linear layers", OptionKind::on_off},
    FamilyOption{"qkv-bias", "Use biases for queries, keys and values", OptionKind::on_off},
    FamilyOption{"tied-head", "Use the token embedding's weights in the head too", OptionKind::on_off}};

}  // namespace

FamilyOption family_option(std::string_view name, ModelValue default_value) {
    FamilyOption option = *std::ranges::find(all_options, name, &FamilyOption::name);
    option.default_value = std::move(default_value);
    return option;
}

void check_divides(const char* divisor, const char* size, const ModelChoices& choices) {
    const std::int64_t parts = choices.size(divisor), whole = choices.size(size),
                       below = whole / parts * parts;
    if (whole == below) return;
    if (below > 0) {
        const std::int64_t above = saturated_sum(below, parts);
        refuse(
            {fmt::format("{} divide {}", divisor, size), parts, whole, fmt::format("--{} {}", size, below)},
            "--{} {} does not divide --{} {}; try --{} {}{}", divisor, parts, size, whole, size, below,
            above % parts == 0 ? fmt::format(" or {}", above) : "");
    }
    // The smallest quotient to suggest, such as a head size.
    constexpr std::int64_t smallest_part = 16;
    std::int64_t most = std::max<std::int64_t>(1, whole / smallest_part);
    while (whole % most != 0) --most;
    refuse({fmt::format("{} divide {}", divisor, size), parts, whole, fmt::format("--{} {}", divisor, most)},
           "--{} {} is more than --{} {}; give a divisor of that, such as {}", divisor, parts, size, whole,
           most);
}

HeadSizes head_sizes(const ModelChoices& choices) {
    const auto has = [&](const char* name) {
        return choices.values.contains(name) && choices.size(name) > 0;
    };
    const std::int64_t H = choices.size("heads"), K = has("kv-heads") ? choices.size("kv-heads") : H;
    if (!has("head-size")) check_divides("heads", "channels", choices);
    const std::int64_t D = has("head-size") ? choices.size("head-size") : choices.size("channels") / H;
    if (K > H || H % K != 0)
        refuse({"heads of keys divide heads", K, H, "--kv-heads 0"},
               "--kv-heads {} does not divide --heads {}; give a divisor, or 0 for as many as heads", K, H);
    if (D % 2 != 0)
        user_error("heads of {} elements have no pairs to rotate; give {}", D,
                   has("head-size") ? fmt::format("--head-size {}", D + 1)
                                    : "--channels that are an even multiple of --heads");
    return {H, K, D};
}

}  // namespace llmc
