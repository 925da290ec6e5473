// HellaSwag: contexts with four endings each. A model should give the right ending the lowest loss. The
// examples are the data set's own lines of JSON. The trainer computes the losses.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/data/data_record.h"
#include "llmc/io/metrics.h"
#include "llmc/model/model.h"

namespace llmc {

class Tokenizer;

// Each example makes four rows, one for each ending, in order. A row has the tokens of the context `ctx`,
// then those of a space and the ending. Only the ending's tokens are targets. A longer row keeps its last T+1
// tokens.
class HellaSwag {
  public:
    static constexpr std::size_t endings = 4;

    // Reads the first `limit` examples of a file, or all (0). A UserError begins with --eval-hellaswag and names the
    // line, or says that there is no tokenizer.
    HellaSwag(const std::string& path, std::int64_t limit, const Model& model, const Tokenizer* tokenizer);

    std::int64_t examples() const { return std::ssize(examples_); }
    std::int64_t rows() const { return examples() * std::int64_t{endings}; }
    // The file and its number of examples, to compare with those of other ranks.
    const OptionRecord& record() const { return record_; }

    // Fills T inputs and T targets. A target outside the ending is ignored_target (-1).
    void read(std::int64_t row, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;

    // The score from the sum of each row's losses. `accuracy` chooses the ending with the lowest sum.
    // `accuracy_norm` chooses the one with the lowest mean per token, as llm.c does; others divide by
    // characters. If losses are equal, the first ending is chosen.
    HellaSwagScore score(std::span<const double> row_losses) const;

  private:
    struct Example {
        std::vector<std::int32_t> context;
        std::array<std::vector<std::int32_t>, endings> ending;
        std::size_t label = 0;
    };
    std::size_t targets_of(const Example& example, std::size_t ending) const;

    std::vector<Example> examples_;
    OptionRecord record_;
    std::size_t sequence_length_;
};

}  // namespace llmc
