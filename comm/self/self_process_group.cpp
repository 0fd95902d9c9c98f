#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "comm/process_group.h"

namespace kdtree {

namespace {

class SelfProcessGroup final : public ProcessGroup {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_size() const override { return 1; }
  std::string host_name() const override {
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    return name.data();
  }
  void barrier() override {}
  void broadcast(void* /*data*/, std::int64_t /*bytes*/, int /*root*/) override {}
  void all_gather(const void* sent, std::int64_t bytes, void* received) override {
    if (bytes > 0) {
      std::memcpy(received, sent, static_cast<std::size_t>(bytes));
    }
  }
  [[noreturn]] void abort(int exit_code) override { std::_Exit(exit_code); }
};

}  // namespace

std::unique_ptr<ProcessGroup> make_self_process_group() {
  return std::make_unique<SelfProcessGroup>();
}

}  // namespace kdtree
