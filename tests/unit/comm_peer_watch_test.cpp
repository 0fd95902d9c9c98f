// comm/peer_watch between forked processes on the loopback: who is told what when a rank leaves, is
// killed, stands still or announces that it fails.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "comm/peer_watch.h"

namespace kdtree {
namespace {

using std::chrono::milliseconds;

constexpr int kMaxRanks = 4;
constexpr std::size_t kBlockBytes = 512;

// Memory that forked ranks have in common: the group's mail, and what each was told.
struct Shared {
  pthread_barrier_t barrier;
  std::array<std::array<char, kBlockBytes>, kMaxRanks> blocks;
  std::array<std::array<char, 1024>, kMaxRanks> told;
  std::array<std::atomic<bool>, kMaxRanks> watching;
};

// A process group over shared memory: forked ranks without MPI.
class SharedGroup final : public ProcessGroup {
 public:
  SharedGroup(Shared& shared, int rank, int world_size)
      : shared_(shared), rank_(rank), world_size_(world_size) {}
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  int local_rank() const override { return rank_; }
  int local_size() const override { return world_size_; }
  std::string host_name() const override { return "loopback"; }
  void barrier() override { pthread_barrier_wait(&shared_.barrier); }
  void broadcast(void* data, std::int64_t bytes, int root) override {
    exchange(data, bytes);
    std::memcpy(data, block(root), static_cast<std::size_t>(bytes));
    barrier();
  }
  void all_gather(const void* sent, std::int64_t bytes, void* received) override {
    exchange(sent, bytes);
    for (int rank = 0; rank < world_size_; ++rank) {
      std::memcpy(static_cast<char*>(received) + rank * bytes, block(rank),
                  static_cast<std::size_t>(bytes));
    }
    barrier();
  }
  [[noreturn]] void abort(int exit_code) override { std::_Exit(exit_code); }

 private:
  char* block(int rank) { return shared_.blocks[static_cast<std::size_t>(rank)].data(); }
  void exchange(const void* data, std::int64_t bytes) {
    check(bytes <= static_cast<std::int64_t>(kBlockBytes), "{} bytes in a test's mail", bytes);
    std::memcpy(block(rank_), data, static_cast<std::size_t>(bytes));
    barrier();
  }

  Shared& shared_;
  int rank_;
  int world_size_;
};

class PeerWatchTest : public testing::Test {
 protected:
  // What a rank does while it is watched; returning means leaving in good order.
  using Body = std::function<void(PeerWatch& watch, int rank)>;

  void start(int world_size, const PeerWatchOptions& options, const Body& body) {
    void* memory =
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    shared_ = new (memory) Shared();
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared_->barrier, &attributes, static_cast<unsigned>(world_size));
    for (int rank = 0; rank < world_size; ++rank) {
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        run_rank(rank, world_size, options, body);
      }
      children_.push_back(child);
    }
  }

  // Ends what is left of the ranks, so that others can start.
  void finish() {
    for (const pid_t child : children_) {
      if (child > 0) {
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
      }
    }
    children_.clear();
    if (shared_ != nullptr) {
      munmap(shared_, sizeof(Shared));
      shared_ = nullptr;
    }
  }
  void TearDown() override { finish(); }

  // Waits until rank has been told of a failure or left in good order, and returns its exit code: 3
  // told, 0 left, -1 neither within 20 s.
  int exit_code_of(int rank) {
    pid_t& process = children_[static_cast<std::size_t>(rank)];
    for (int i = 0; i < 2000; ++i) {
      int status = 0;
      if (waitpid(process, &status, WNOHANG) > 0) {
        process = 0;  // its number may be given away again
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    return -1;
  }
  std::string told(int rank) const { return shared_->told[static_cast<std::size_t>(rank)].data(); }
  void wait_until_watching(int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      while (!shared_->watching[static_cast<std::size_t>(rank)]) {
        std::this_thread::sleep_for(milliseconds(1));
      }
    }
  }
  pid_t child(int rank) const { return children_[static_cast<std::size_t>(rank)]; }

  static constexpr int kTold = 3;

 private:
  [[noreturn]] void run_rank(int rank, int world_size, const PeerWatchOptions& options,
                             const Body& body) {
    SharedGroup group(*shared_, rank, world_size);
    auto& text = shared_->told[static_cast<std::size_t>(rank)];
    {
      PeerWatch watch(group, options,
                      {.on_failure =
                           [&text](const std::string& message) {
                             std::strncpy(text.data(), message.c_str(), text.size() - 1);
                             std::_Exit(kTold);
                           },
                       .describe = [rank] { return "at step " + std::to_string(rank + 10); }});
      shared_->watching[static_cast<std::size_t>(rank)] = true;
      body(watch, rank);
    }
    std::_Exit(0);
  }

  Shared* shared_ = nullptr;
  std::vector<pid_t> children_;
};

const PeerWatchOptions kQuick{.heartbeat = milliseconds(50)};

void stay(PeerWatch& /*watch*/, int /*rank*/) {
  std::this_thread::sleep_for(std::chrono::seconds(60));
}

TEST_F(PeerWatchTest, LeavingInAnyOrderIsNoFailure) {
  for (const int first : {0, 1, 2}) {
    start(3, kQuick, [first](PeerWatch&, int rank) {
      std::this_thread::sleep_for(milliseconds(rank == first ? 0 : 300));
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(exit_code_of(rank), 0) << "rank " << rank << ": " << told(rank);
    }
    finish();
  }
}

TEST_F(PeerWatchTest, OneRankWatchesNobody) {
  start(1, kQuick, [](PeerWatch& watch, int) { watch.announce_failure("nobody hears this"); });
  EXPECT_EQ(exit_code_of(0), 0);
}

TEST_F(PeerWatchTest, AKilledRankIsNamedToAllOthers) {
  start(4, kQuick, stay);
  wait_until_watching(4);
  std::this_thread::sleep_for(milliseconds(300));
  kill(child(2), SIGKILL);
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(exit_code_of(rank), kTold) << "rank " << rank;
    EXPECT_NE(told(rank).find("rank 2 on loopback is lost: its connection closed"),
              std::string::npos)
        << told(rank);
  }
  // Rank 0 says what each was doing.
  EXPECT_NE(told(0).find("rank 0: at step 10"), std::string::npos) << told(0);
  EXPECT_NE(told(0).find("rank 3: at step 13"), std::string::npos) << told(0);
}

TEST_F(PeerWatchTest, AKilledRankZeroIsNamedToAllOthers) {
  start(3, kQuick, stay);
  wait_until_watching(3);
  kill(child(0), SIGKILL);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(exit_code_of(rank), kTold) << "rank " << rank;
    EXPECT_NE(told(rank).find("rank 0 on loopback is lost"), std::string::npos) << told(rank);
  }
}

TEST_F(PeerWatchTest, AStoppedRankIsNamedAfterTheSilenceLimit) {
  start(3, {.heartbeat = milliseconds(50), .silence_limit = milliseconds(2000)}, stay);
  wait_until_watching(3);
  kill(child(1), SIGSTOP);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(exit_code_of(rank), kTold) << "rank " << rank;
    EXPECT_NE(told(rank).find("rank 1 on loopback is lost: no sign of life for 2."),
              std::string::npos)
        << told(rank);
  }
}

TEST_F(PeerWatchTest, WithoutASilenceLimitAStoppedRankIsWaitedFor) {
  start(2, {.heartbeat = milliseconds(20), .silence_limit = milliseconds(0)},
        [](PeerWatch&, int) { std::this_thread::sleep_for(milliseconds(1500)); });
  wait_until_watching(2);
  kill(child(1), SIGSTOP);
  EXPECT_EQ(exit_code_of(0), 0) << told(0);
  kill(child(1), SIGCONT);
  EXPECT_EQ(exit_code_of(1), 0) << told(1);
}

TEST_F(PeerWatchTest, AllStoppedTogetherIsNoSilence) {
  start(2, {.heartbeat = milliseconds(50), .silence_limit = milliseconds(800)},
        [](PeerWatch&, int) { std::this_thread::sleep_for(milliseconds(3500)); });
  wait_until_watching(2);
  kill(child(0), SIGSTOP);
  kill(child(1), SIGSTOP);
  std::this_thread::sleep_for(milliseconds(2000));
  kill(child(0), SIGCONT);
  kill(child(1), SIGCONT);
  EXPECT_EQ(exit_code_of(0), 0) << told(0);
  EXPECT_EQ(exit_code_of(1), 0) << told(1);
}

TEST_F(PeerWatchTest, AnAnnouncedFailureReachesAllOthers) {
  for (const int failing : {0, 2}) {
    start(3, kQuick, [failing](PeerWatch& watch, int rank) {
      if (rank == failing) {
        watch.announce_failure("all_gather number 7 came to no end");
        std::_Exit(4);
      }
      std::this_thread::sleep_for(std::chrono::seconds(60));
    });
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == failing) {
        EXPECT_EQ(exit_code_of(rank), 4);
        continue;
      }
      EXPECT_EQ(exit_code_of(rank), kTold) << "rank " << rank;
      const std::string expected = "rank " + std::to_string(failing) +
                                   " on loopback failed: all_gather number 7 came to no end";
      EXPECT_NE(told(rank).find(expected), std::string::npos) << told(rank);
    }
    finish();
  }
}

}  // namespace
}  // namespace kdtree
