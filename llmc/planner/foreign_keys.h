// The keys of DeepSpeed's and Accelerate's configurations beside our options (docs/coming-from.md).
#pragma once

#include <span>
#include <string_view>

namespace llmc {

// What a key's value becomes.
enum class KeyAs {
    ignored,       // nothing: `to` says why
    whole,         // the option `to`, a whole number
    number,        // a number
    flag,          // a switch
    text,          // a text
    choice,        // what `choices` has beside the value
    power_of_two,  // 2 to that power
    betas,         // a list of --beta1 and --beta2
    batch,         // of all processes, in sequences
    accumulation,  // micro-batches of a process in a step
    file           // another configuration, of DeepSpeed
};

struct KeyChoice {
    std::string_view theirs;  // in any case
    // Our value; empty: nothing has to be said; behind an exclamation mark why it is ignored.
    std::string_view ours;
};

struct ForeignKey {
    std::string_view
        key;  // with a dot between sections; "x.*" is all of a section that is not named otherwise
    KeyAs as;
    std::string_view to;
    std::string_view same = {};  // values that ask for what is so here anyway, separated by |
    std::span<const KeyChoice> choices = {};
};

// A key may have several rows, which are all taken.
std::span<const ForeignKey> deepspeed_keys();
std::span<const ForeignKey> accelerate_keys();

}  // namespace llmc
