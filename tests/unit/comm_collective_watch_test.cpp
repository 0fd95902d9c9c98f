// What is said about a collective that does not finish, and that it ends the process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "comm/mpi/collective_watch.h"
#include "core/check.h"
#include "core/log.h"

namespace kdtree {

namespace {

using std::chrono::seconds;

struct EndedChild {
  int exit_code = -1;  // -1: it did not exit by itself
  std::string said;    // on stderr
};

// Runs `body` in a child process. Not a death test of googletest: under the address sanitizer those
// hang.
EndedChild run_in_child(const std::function<void()>& body) {
  std::array<int, 2> ends{};
  check(::pipe(ends.data()) == 0, "no pipe");
  const pid_t child = ::fork();
  check(child >= 0, "no child process");
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[0]);
    ::close(ends[1]);
    body();
    std::_Exit(0);
  }
  ::close(ends[1]);
  EndedChild ended;
  std::array<char, 4096> buffer{};
  for (ssize_t size = 0; (size = ::read(ends[0], buffer.data(), buffer.size())) > 0;) {
    ended.said.append(buffer.data(), static_cast<std::size_t>(size));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ended;
}

EndedChild wait_in(const std::string& ranks) {
  return run_in_child([&ranks] {
    init_logging("warn", 3, 8);  // to stderr
    CollectiveWatch watch(3, 8, seconds(1));
    { const CollectiveWatch::Scope first(watch, "broadcast", {}, ""); }
    const CollectiveWatch::Scope scope(watch, "all_reduce_sum", {.what = "experts", .layer = 2},
                                       ranks);
    std::this_thread::sleep_for(seconds(30));
  });
}

TEST(CollectiveWatchTest, NamesTheRankItsPartAndThePurpose) {
  const EndedChild part = wait_in("1, 3");
  EXPECT_EQ(part.exit_code, 124);
  EXPECT_NE(part.said.find("rank 3 of 8 waits since 1 s in all_reduce_sum number 2 of ranks 1, 3 "
                           "(experts, layer 2): another rank has not come"),
            std::string::npos)
      << part.said;
  const EndedChild whole = wait_in("");
  EXPECT_EQ(whole.exit_code, 124);
  EXPECT_NE(
      whole.said.find("all_reduce_sum number 2 (experts, layer 2): another rank has not come"),
      std::string::npos)
      << whole.said;
}

}  // namespace

}  // namespace kdtree
