// HellaSwag: sentences with four endings each, of which a model is to find the right one by its loss. The examples are the
// data set's own lines of JSON; how losses are computed is the trainer's business.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/data/bpe.h"
#include "llmc/io/metrics.h"
#include "llmc/model/model.h"

namespace llmc {

// Of each example four rows, one an ending, in order. A row is the tokens of the context `ctx`, and then those of a space and
// the ending, which alone are targets. Of a row of more than T+1 tokens the last T+1 remain.
class HellaSwag {
  public:
    static constexpr std::size_t endings = 4;

    // The first `limit` examples of a file, or all (0). With `bpe` null the vocabulary must be bytes. UserErrors begin with
    // --eval-hellaswag, and name the line.
    HellaSwag(const std::string& path, std::int64_t limit, const Model& model, const BytePairEncoder* bpe);

    std::int64_t examples() const { return std::ssize(examples_); }
    std::int64_t rows() const { return examples() * std::int64_t{endings}; }

    // Fills T inputs and T targets, ignored_target (-1) but for the ending.
    void read(std::int64_t row, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;

    // Of the sums of the rows' losses: the ending with the lowest sum is chosen (accuracy), and that with the lowest mean
    // over its tokens (accuracy_norm, as in llm.c; others divide by characters); the first of equal ones.
    HellaSwagScore score(std::span<const double> row_losses) const;

  private:
    struct Example {
        std::vector<std::int32_t> context;
        std::array<std::vector<std::int32_t>, endings> ending;
        std::size_t label = 0;
    };
    std::size_t targets_of(const Example& example, std::size_t ending) const;

    std::vector<Example> examples_;
    std::size_t sequence_length_;
};

}  // namespace llmc
