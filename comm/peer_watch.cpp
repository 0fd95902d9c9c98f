#include "comm/peer_watch.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "comm/peer_socket.h"
#include "core/log.h"

namespace kdtree {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using HostName = std::array<char, 64>;

// How to reach rank 0; port 0 where it cannot listen.
struct Invitation {
  std::uint64_t token = 0;
  std::uint16_t port = 0;
  std::uint16_t num_addresses = 0;
  std::array<std::uint32_t, 16> addresses{};
};

// The other end of a connection.
struct Peer {
  int rank = 0;
  Channel channel;
  milliseconds silence{0};
  std::string state = "nothing heard yet";
};

// Somebody who has connected and not yet said who it is.
struct Caller {
  Channel channel;
  milliseconds age{0};
};

std::uint64_t random_token() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

std::vector<HostName> gather_hosts(ProcessGroup& group) {
  HostName own{};
  const std::string host = group.host_name();
  std::copy_n(host.begin(), std::min(host.size(), own.size() - 1), own.begin());
  std::vector<HostName> hosts(static_cast<std::size_t>(group.world_size()));
  group.all_gather(&own, sizeof own, hosts.data());
  return hosts;
}

}  // namespace

class PeerWatch::Impl {
 public:
  Impl(ProcessGroup& group, const PeerWatchOptions& options, PeerWatchEvents events);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();
  void announce_failure(const std::string& text);

 private:
  bool join(const Invitation& invitation);
  void start_thread();
  void wake() const;
  void run();
  void wait_for_news(milliseconds limit);
  bool serve_requests();
  bool all_are_here();
  void part();
  void greet_callers(milliseconds elapsed);
  bool listen_to(Peer& peer, milliseconds elapsed);
  bool handle(Peer& peer, const Frame& frame);
  void send_signs_of_life();
  void send_to_all(const Frame& frame, int except);
  Frame frame_of(Frame::Kind kind, const std::string& text = "") const;
  std::string describe_rank(int rank) const;
  void fail(int rank, const std::string& text);

  int rank_;
  int world_size_;
  PeerWatchOptions options_;
  PeerWatchEvents events_;
  std::vector<HostName> hosts_;
  std::uint64_t token_ = 0;
  std::optional<Listener> listener_;  // rank 0
  std::vector<Caller> callers_;       // rank 0
  std::vector<Peer> peers_;           // rank 0: all that have joined; others: rank 0
  std::vector<char> left_;            // [world_size] has said goodbye
  Descriptor wake_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;                        // set by the destructor
  bool over_ = false;                        // set by the thread when it watches no longer
  std::vector<char> expected_;               // [world_size] has joined; empty until all have tried
  std::optional<std::string> announcement_;  // not yet sent
  std::thread thread_;
};

PeerWatch::Impl::Impl(ProcessGroup& group, const PeerWatchOptions& options, PeerWatchEvents events)
    : rank_(group.rank()),
      world_size_(group.world_size()),
      options_(options),
      events_(std::move(events)),
      hosts_(gather_hosts(group)),
      left_(static_cast<std::size_t>(world_size_)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (world_size_ == 1) {
    return;
  }
  Invitation invitation;
  if (rank_ == 0) {
    listener_ = listen_anywhere();
    if (listener_) {
      const std::size_t count = std::min(listener_->addresses.size(), invitation.addresses.size());
      std::copy_n(listener_->addresses.begin(), count, invitation.addresses.begin());
      invitation.num_addresses = static_cast<std::uint16_t>(count);
      invitation.port = listener_->port;
      invitation.token = random_token();
    }
  }
  group.broadcast(&invitation, sizeof invitation, 0);
  token_ = invitation.token;
  // Rank 0's thread lets the others in while they try.
  const bool joined = rank_ == 0 ? listener_.has_value() : join(invitation);
  if (joined) {
    start_thread();
  }
  const char own = joined ? 1 : 0;
  std::vector<char> all(static_cast<std::size_t>(world_size_));
  group.all_gather(&own, 1, all.data());
  {
    const std::lock_guard lock(mutex_);
    expected_ = all;
  }
  for (int rank = 0; rank_ == 0 && rank < world_size_; ++rank) {
    if (all[static_cast<std::size_t>(rank)] == 0) {
      spdlog::warn(
          "{} cannot talk to rank 0 over TCP: if it dies, the others notice only by the time limit "
          "of a collective",
          describe_rank(rank));
    }
  }
}

PeerWatch::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void PeerWatch::Impl::announce_failure(const std::string& text) {
  if (std::this_thread::get_id() == thread_.get_id()) {
    return;  // on_failure itself: the others are told already
  }
  std::unique_lock lock(mutex_);
  if (!thread_.joinable() || over_) {
    return;
  }
  announcement_ = text;
  wake();
  changed_.wait_for(lock, std::chrono::seconds(1), [this] { return !announcement_ || over_; });
}

// Connects to rank 0: by the loopback on its own host, by its addresses in turn from others.
bool PeerWatch::Impl::join(const Invitation& invitation) {
  if (invitation.port == 0) {
    return false;
  }
  std::vector<std::uint32_t> addresses(invitation.addresses.begin(),
                                       invitation.addresses.begin() + invitation.num_addresses);
  if (hosts_[static_cast<std::size_t>(rank_)] == hosts_[0]) {
    addresses.insert(addresses.begin(), htonl(INADDR_LOOPBACK));
  }
  for (const std::uint32_t address : addresses) {
    Channel channel = connect_channel(address, invitation.port, options_.connect_limit);
    Frame answer;
    // A port that another program holds on that address does not know the token.
    if (channel.open() && channel.send(frame_of(Frame::kHello)) &&
        channel.wait_for(answer, options_.connect_limit) && answer.kind == Frame::kWelcome &&
        answer.token == token_) {
      Peer& root = peers_.emplace_back();
      root.channel = std::move(channel);
      return true;
    }
  }
  return false;
}

void PeerWatch::Impl::start_thread() {
  // Signals are for the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void PeerWatch::Impl::wake() const {
  const std::uint64_t one = 1;
  // A counter that is full wakes as well.
  static_cast<void>(!write(wake_.number(), &one, sizeof one));
}

void PeerWatch::Impl::run() {
  auto last_round = Clock::now();
  auto last_sign = last_round - options_.heartbeat;
  const milliseconds round = std::max(options_.heartbeat / 4, milliseconds(1));
  bool watching = true;
  bool parting = false;
  while (watching && !parting) {
    wait_for_news(round);
    const auto now = Clock::now();
    // A process that was stopped and goes on has not been listening: that is no silence of others.
    const milliseconds elapsed =
        std::min(std::chrono::duration_cast<milliseconds>(now - last_round), 4 * round);
    last_round += std::chrono::duration_cast<milliseconds>(now - last_round);
    greet_callers(elapsed);
    for (std::size_t i = 0; watching && i < peers_.size(); ++i) {
      watching = listen_to(peers_[i], elapsed);
    }
    std::erase_if(peers_, [](const Peer& peer) { return !peer.channel.open(); });
    watching = watching && all_are_here();
    if (watching && now - last_sign >= options_.heartbeat) {
      send_signs_of_life();
      last_sign = now;
    }
    parting = watching && !serve_requests();
  }
  if (parting) {
    part();
  }
  const std::lock_guard lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

// A rank that has joined and is neither connected nor gone in good order is lost. While ranks still
// try to join, a closed connection means nothing.
bool PeerWatch::Impl::all_are_here() {
  std::vector<char> missing;
  {
    const std::lock_guard lock(mutex_);
    missing = expected_;
  }
  if (missing.empty()) {
    return true;
  }
  for (std::size_t rank = 0; rank < missing.size(); ++rank) {
    const bool watched = static_cast<int>(rank) != rank_ && (rank_ == 0 || rank == 0);
    missing[rank] = static_cast<char>(missing[rank] != 0 && watched && left_[rank] == 0);
  }
  for (const Peer& peer : peers_) {
    missing[static_cast<std::size_t>(peer.rank)] = 0;
  }
  const auto lost = std::find(missing.begin(), missing.end(), 1);
  if (lost == missing.end()) {
    return true;
  }
  fail(static_cast<int>(lost - missing.begin()),
       "is lost: its connection closed without a goodbye (its process was killed or crashed)");
  return false;
}

// Says goodbye and lets the others read it before the connection closes.
void PeerWatch::Impl::part() {
  send_to_all(frame_of(Frame::kGoodbye), rank_);
  const auto deadline = Clock::now() + milliseconds(500);
  for (Peer& peer : peers_) {
    Frame frame;
    while (peer.channel.wait_for(
               frame, std::chrono::duration_cast<milliseconds>(deadline - Clock::now())) &&
           frame.kind != Frame::kGoodbye) {
    }
    peer.channel.close();
  }
}

void PeerWatch::Impl::wait_for_news(milliseconds limit) {
  std::vector<pollfd> waiting{{wake_.number(), POLLIN, 0}};
  if (listener_) {
    waiting.push_back({listener_->socket.number(), POLLIN, 0});
  }
  for (const Caller& caller : callers_) {
    waiting.push_back({caller.channel.number(), POLLIN, 0});
  }
  for (const Peer& peer : peers_) {
    waiting.push_back({peer.channel.number(), POLLIN, 0});
  }
  poll(waiting.data(), waiting.size(), static_cast<int>(limit.count()));
  std::uint64_t count = 0;
  static_cast<void>(!read(wake_.number(), &count, sizeof count));
}

// What other threads want; false if that is to end the watch.
bool PeerWatch::Impl::serve_requests() {
  const std::lock_guard lock(mutex_);
  if (announcement_) {
    send_to_all(frame_of(Frame::kFailed, "failed: " + *announcement_), rank_);
    announcement_.reset();
    changed_.notify_all();
  }
  return !stop_;
}

// Lets in those who know the token.
void PeerWatch::Impl::greet_callers(milliseconds elapsed) {
  if (!listener_) {
    return;
  }
  for (Channel channel = accept_channel(*listener_); channel.open();
       channel = accept_channel(*listener_)) {
    callers_.push_back({std::move(channel)});
  }
  for (Caller& caller : callers_) {
    caller.age += elapsed;
    Frame frame;
    const Channel::Received received = caller.channel.receive(frame);
    if (received == Channel::Received::kNothing && caller.age < options_.connect_limit) {
      continue;
    }
    Channel channel = std::move(caller.channel);
    caller.channel.close();
    const bool known = received == Channel::Received::kFrame && frame.kind == Frame::kHello &&
                       frame.token == token_ && frame.rank > 0 && frame.rank < world_size_;
    if (known && channel.send(frame_of(Frame::kWelcome))) {
      Peer& peer = peers_.emplace_back();
      peer.rank = frame.rank;
      peer.channel = std::move(channel);
    }
  }
  std::erase_if(callers_, [](const Caller& caller) { return !caller.channel.open(); });
}

// Takes in what a peer has sent; false when the watch is over.
bool PeerWatch::Impl::listen_to(Peer& peer, milliseconds elapsed) {
  Frame frame;
  Channel::Received received = peer.channel.receive(frame);
  peer.silence = received == Channel::Received::kFrame ? milliseconds(0) : peer.silence + elapsed;
  for (; received == Channel::Received::kFrame; received = peer.channel.receive(frame)) {
    if (!handle(peer, frame)) {
      return false;
    }
    if (!peer.channel.open()) {
      return true;  // it said goodbye
    }
  }
  if (received == Channel::Received::kClosed) {
    peer.channel.close();
    return true;  // all_are_here() finds out what it means
  }
  if (options_.silence_limit.count() > 0 && peer.silence > options_.silence_limit) {
    fail(peer.rank,
         fmt::format("is lost: no sign of life for {:.1f} s (its host is down or unreachable, or "
                     "its process is stopped)",
                     std::chrono::duration<double>(peer.silence).count()));
    return false;
  }
  return true;
}

bool PeerWatch::Impl::handle(Peer& peer, const Frame& frame) {
  if (frame.token != token_) {
    return true;
  }
  if (frame.kind == Frame::kAlive) {
    peer.state = frame.text.data();
  } else if (frame.kind == Frame::kGoodbye) {
    left_[static_cast<std::size_t>(peer.rank)] = 1;
    peer.channel.close();
  } else if (frame.kind == Frame::kFailed && frame.rank >= 0 && frame.rank < world_size_) {
    fail(frame.rank, frame.text.data());
    return false;
  }
  return true;
}

void PeerWatch::Impl::send_signs_of_life() {
  send_to_all(frame_of(Frame::kAlive, events_.describe ? events_.describe() : ""), rank_);
}

// A send that fails is no news: the same connection closes for reading, too.
void PeerWatch::Impl::send_to_all(const Frame& frame, int except) {
  for (Peer& peer : peers_) {
    if (peer.rank != except && peer.channel.open()) {
      peer.channel.send(frame);
    }
  }
}

Frame PeerWatch::Impl::frame_of(Frame::Kind kind, const std::string& text) const {
  Frame frame;
  frame.kind = kind;
  frame.rank = rank_;
  frame.token = token_;
  frame.set_text(text);
  return frame;
}

std::string PeerWatch::Impl::describe_rank(int rank) const {
  return fmt::format("rank {} on {}", rank, hosts_[static_cast<std::size_t>(rank)].data());
}

// Rank 0 tells the others before it looks after itself. `text` continues "rank 1 on host ...".
void PeerWatch::Impl::fail(int rank, const std::string& text) {
  std::string message = fmt::format("{} {}", describe_rank(rank), text);
  if (rank_ == 0) {
    Frame frame = frame_of(Frame::kFailed, text);
    frame.rank = rank;
    send_to_all(frame, rank);
    if (events_.describe) {
      message += fmt::format("\n  rank 0: {}", events_.describe());
      for (const Peer& peer : peers_) {
        message += fmt::format("\n  rank {}: {}", peer.rank, peer.state);
      }
    }
  }
  if (events_.on_failure) {
    events_.on_failure(message);
  }
}

PeerWatch::PeerWatch(ProcessGroup& group, const PeerWatchOptions& options, PeerWatchEvents events)
    : impl_(std::make_unique<Impl>(group, options, std::move(events))) {}

PeerWatch::~PeerWatch() = default;

void PeerWatch::announce_failure(const std::string& text) {
  impl_->announce_failure(text);
}

}  // namespace kdtree
