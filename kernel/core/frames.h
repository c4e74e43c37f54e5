/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A pool of page frames. The pool takes them from the kernel when it is made and gives them back
 * when it ends. In between frames only change hands between the pool and its user.
 *
 * Frames travel in bundles. A bundle is a free frame whose memory is a stack of the numbers of up
 * to 512 other free frames (refined exmap, section III-B). Each of the pool's users has a lane, and
 * no other user enters it. A lane keeps one bundle, and visits the shared list once for 513 frames.
 * A lane that finds the shared list empty takes the bundle of an idle lane, so that a free frame is
 * always found.
 *
 * Invariants:
 *
 * - A frame is in one place: in a bundle, in the hands of a lane's user, or set aside while
 *   something holds it.
 * - Only the pool writes a frame that is in a bundle, so the stack's numbers are right. A frame
 *   returns to a bundle after the TLBs were flushed and secondary MMUs were told, and only if the
 *   pool has the only reference; the pool reads the count of every frame. The core takes references
 *   through a page's entry, under the lock of its table. KVM does so too: for nested virtualisation
 *   it keeps them and writes, also to frames of a surface that is not pinnable. A fast pin does not
 *   take the lock, but reads the entry again and gives up. The entry was changed before, under that
 *   lock and by an atomic operation, so no reference is taken after the pool has read the count.
 * - A frame that is handed out does not hold numbers of other frames.
 * - Frames of blocks (frames_blocks.c) are never in bundles.
 * - All frames are on one list, so none is lost, whatever became of its user.
 */
#ifndef VELLUM_FRAMES_H
#define VELLUM_FRAMES_H

#include <linux/atomic.h>
#include <linux/cache.h>
#include <linux/list.h>
#include <linux/mm_types.h>
#include <linux/page_ref.h>
#include <linux/spinlock.h>
#include <linux/types.h>

#define FRAME_BUNDLE	512
/* The number of frames in a block. */
#define FRAME_BLOCK	512

/* An allocation fails rather than have the kernel kill a process for it. */
#define FRAME_GFP (GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_RETRY_MAYFAIL | __GFP_NOWARN)

/* Free frames that one user has in hand. The frame that holds the stack is one more of them. */
struct frame_bundle {
	u64		*stack;		/* NULL: no frame at all */
	unsigned int	count;		/* numbers on the stack */
	unsigned int	want;		/* how many the user will take, as far as it knows */
};

/* How a pool keeps its frames. All but the first are for comparison. */
enum frame_design {
	FRAMES_BUNDLES,		/* as described above */
	FRAMES_STEALING,	/* a list in each lane; lanes steal: frames_steal.c */
	FRAMES_FROM_KERNEL,	/* from the kernel and back to it: frames_kernel.c */
};

struct frame_lane {
	/* The lane's bundle while its user is idle: packed into a word, and taken by exchange. */
	atomic64_t		idle;
	/*
	 * Freed frames that wait for the flush. The frame that holds the stack is not one of them.
	 */
	struct frame_bundle	pending;
	/* Counts of frames, and of visits to the shared list. Only the lane's user writes them. */
	u64			taken, given, refills;
	/* The frames of blocks among those. */
	u64			block_taken, block_given;

	/* For comparison: holds the user's bundle, and is never handed out. */
	u64			*scratch;
	/*
	 * FRAMES_STEALING: a chain through page->private, and its length. The lock protects both.
	 */
	spinlock_t		lock;
	u64			first, length;	/* the length is also read without the lock */
	unsigned int		victim;		/* the lane that it stole from last */
} ____cacheline_aligned_in_smp;

struct frame_block {
	u64		frame;		/* the first */
	u32		back;		/* frames that no user has */
	u32		next;		/* the next whole block; 0: none */
};

struct frame_pool {
	enum frame_design	design;
	u64			frames;		/* that users may have, without blocks */
	unsigned int		count;		/* number of lanes */
	struct frame_lane	*lanes;

	/* The bundles that are in no lane: the number of the first one's frame, and a tag. */
	atomic64_t		shared ____cacheline_aligned_in_smp;

	spinlock_t		lock;		/* protects the lists */
	struct list_head	all;		/* all frames, through page->lru */
	struct list_head	pinned;		/* frames freed while something held them */
	unsigned long		pinned_count;

	/* The lock also protects all of these but the first two. */
	struct frame_block	*blocks;	/* NULL: none, and never any */
	u32			block_count;
	u32			free_block;	/* the first whole block; 0: none */
	u32			blocks_free;	/* number of whole blocks */
	u64			blocks_loose;	/* frames back in blocks that are not whole */
	u64			blocks_pinned;	/* frames of blocks on the pinned list */

	/* Transfers under way. Frames that they hold must not be reused, and are released soon. */
	atomic_t		holders;
	atomic64_t		outstanding;	/* FRAMES_FROM_KERNEL: frames of users */
};

int frame_pool_init(struct frame_pool *pool, enum frame_design design, u64 frames,
		    unsigned int lanes);
void frame_pool_destroy(struct frame_pool *pool);
u64 frame_pool_resident(struct frame_pool *pool);
/* The same, without frames of blocks. */
u64 frame_pool_lent(struct frame_pool *pool);

/*
 * Grows the pool, or shrinks it by free frames. The caller is the lane's user. Returns the number
 * of frames that the pool has then.
 */
u64 frame_pool_resize(struct frame_pool *pool, struct frame_lane *lane, u64 frames);

/*
 * Returns a frame that its user still had when the pool ends. Only for FRAMES_FROM_KERNEL, which
 * keeps no list.
 */
void frame_pool_forget(struct frame_pool *pool, u64 frame);

/*
 * Take frames. From begin to end the caller has the lane's bundle in hand. frame_take_one() takes
 * one frame and leaves the bundle with the lane. frame_take_back() returns a frame to the bundle in
 * the caller's hand, frame_take_back_one() returns it to the lane.
 */
u64 __frame_take(struct frame_pool *pool, struct frame_lane *lane, struct frame_bundle *bundle);
u64 __frame_take_one(struct frame_pool *pool, struct frame_lane *lane, u64 word);
void frame_take_back(struct frame_pool *pool, struct frame_lane *lane,
		     struct frame_bundle *bundle, u64 frame);
void frame_take_back_one(struct frame_pool *pool, struct frame_lane *lane, u64 frame);
void __frame_take_end(struct frame_pool *pool, struct frame_lane *lane,
		      struct frame_bundle *bundle);

/* Gives frames back. They are pending while TLBs may have them, and settled after the flush. */
void frame_settle(struct frame_pool *pool, struct frame_lane *lane);

/*
 * Makes the blocks of a new pool. There are fewer than asked for if the kernel does not have so
 * many frames in a row.
 */
int frame_blocks_init(struct frame_pool *pool, u32 count);

/*
 * Takes a whole block, and returns its first frame; 0 when no block is whole. The user gives it
 * back after the flush. The user counts these frames in its lane.
 */
u64 frame_block_take(struct frame_pool *pool);
void frame_block_give(struct frame_pool *pool, u64 frame);

/*
 * Takes back a single frame; false if it is of no block. frame_blocks_collect() takes back all
 * frames of blocks that are in a bundle.
 */
bool frame_block_take_back(struct frame_pool *pool, struct frame_lane *lane, u64 frame);
void frame_blocks_collect(struct frame_pool *pool, struct frame_lane *lane,
			  struct frame_bundle *bundle);

/*
 * A bundle in one word: the number of the stack's frame, and the count of numbers on the stack. The
 * page->private of a bundle on the shared list has the same form, with the next bundle's frame. The
 * head of that list has a tag in place of the count, and every push advances the tag. So a bundle
 * that was popped and pushed again between a thread's read and its exchange is not mistaken for the
 * old one.
 */
#define FRAME_BITS	40
#define FRAME_MASK	((1ULL << FRAME_BITS) - 1)

static inline u64 frame_pack(u64 frame, u64 count_or_tag)
{
	return frame | count_or_tag << FRAME_BITS;
}

static inline u64 frame_of(u64 *stack)
{
	return page_to_pfn(virt_to_page(stack));
}

static inline u64 *frame_memory(u64 frame)
{
	return page_address(pfn_to_page(frame));
}

static inline struct frame_bundle frame_unpack(u64 word)
{
	struct frame_bundle bundle = {};

	if (word) {
		bundle.stack = frame_memory(word & FRAME_MASK);
		bundle.count = word >> FRAME_BITS;
	}
	return bundle;
}

/* Whether something other than the pool has a reference. */
static inline bool frame_is_held(struct page *page)
{
	return page_ref_count(page) != 1;
}

/*
 * Set aside a frame that something holds, and look at it again; the lock is held. True: the frame
 * is free, and belongs to the caller.
 */
void frame_set_aside(struct frame_pool *pool, struct page *page);
bool frame_is_unpinned(struct frame_pool *pool, struct page *page);

/* The designs for comparison: fill an empty bundle; take back the rest of it, and freed frames. */
void frame_steal_add(struct frame_lane *lane, struct page *page);
bool frame_steal_fill(struct frame_pool *pool, struct frame_lane *lane,
		      struct frame_bundle *bundle);
void frame_steal_drain(struct frame_lane *lane, struct frame_bundle *bundle);
bool frame_kernel_fill(struct frame_pool *pool, struct frame_bundle *bundle);
void frame_kernel_drain(struct frame_pool *pool, struct frame_bundle *bundle);

static inline void frame_take_begin(struct frame_pool *pool, struct frame_lane *lane,
				    struct frame_bundle *bundle, unsigned int want)
{
	if (likely(pool->design == FRAMES_BUNDLES))
		*bundle = frame_unpack(atomic64_xchg(&lane->idle, 0));
	else
		*bundle = (struct frame_bundle){ .stack = lane->scratch };
	bundle->want = want;
}

static inline void frame_take_end(struct frame_pool *pool, struct frame_lane *lane,
				  struct frame_bundle *bundle)
{
	if (unlikely(pool->design != FRAMES_BUNDLES))
		__frame_take_end(pool, lane, bundle);
	else if (likely(bundle->stack))
		atomic64_set_release(&lane->idle,
				     frame_pack(frame_of(bundle->stack), bundle->count));
}

/* Returns the number of a free frame; 0 when there is none. */
static inline u64 frame_take(struct frame_pool *pool, struct frame_lane *lane,
			     struct frame_bundle *bundle)
{
	u64 frame;

	if (unlikely(!bundle->count))
		return __frame_take(pool, lane, bundle);
	frame = bundle->stack[--bundle->count];
	bundle->stack[bundle->count] = 0;
	return frame;
}

static inline u64 frame_take_one(struct frame_pool *pool, struct frame_lane *lane)
{
	u64 word = 0, frame, *top;

	if (likely(pool->design == FRAMES_BUNDLES))
		word = atomic64_xchg(&lane->idle, 0);
	/* The stack is empty, or there is no stack. */
	if (unlikely(word <= FRAME_MASK))
		return __frame_take_one(pool, lane, word);
	word -= frame_pack(0, 1);
	top = frame_memory(word & FRAME_MASK) + (word >> FRAME_BITS);
	frame = *top;
	*top = 0;
	atomic64_set_release(&lane->idle, word);
	return frame;
}

/*
 * Keeps the number of a frame that was taken off. True: the stack is full, so the caller flushes
 * and settles before the next frame.
 */
static inline bool frame_pend(struct frame_lane *lane, u64 frame)
{
	lane->pending.stack[lane->pending.count++] = frame;
	return unlikely(lane->pending.count == FRAME_BUNDLE);
}

/*
 * Returns a single frame that was taken off, after the flush and after secondary MMUs were told.
 * The frame goes on top of the lane's bundle, or is pended and settled. The lane has nothing
 * pending.
 */
static inline void frame_settle_one(struct frame_pool *pool, struct frame_lane *lane, u64 frame)
{
	u64 word = 0;

	if (likely(pool->design == FRAMES_BUNDLES && !pool->blocks &&
		   !frame_is_held(pfn_to_page(frame))))
		word = atomic64_xchg(&lane->idle, 0);
	if (likely(word && word >> FRAME_BITS < FRAME_BUNDLE)) {
		frame_memory(word & FRAME_MASK)[word >> FRAME_BITS] = frame;
		atomic64_set_release(&lane->idle, word + frame_pack(0, 1));
		return;
	}
	if (word)
		atomic64_set_release(&lane->idle, word);
	frame_pend(lane, frame);
	frame_settle(pool, lane);
}

#endif /* VELLUM_FRAMES_H */
