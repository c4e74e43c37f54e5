// SPDX-License-Identifier: GPL-2.0
/* The pool of frames. frames.h lists its invariants. */

#include <linux/delay.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "core/frames.h"

/* How often a lane looks for a frame that should be free; with the waits this is some seconds. */
#define FRAME_ATTEMPTS	10000

static void frame_push_shared(struct frame_pool *pool, struct frame_bundle *bundle)
{
	u64 frame = frame_of(bundle->stack);
	s64 head = atomic64_read(&pool->shared);
	u64 tag;

	do {
		set_page_private(pfn_to_page(frame), frame_pack(head & FRAME_MASK, bundle->count));
		tag = ((u64)head >> FRAME_BITS) + 1;
	} while (!atomic64_try_cmpxchg(&pool->shared, &head, frame_pack(frame, tag)));
	bundle->stack = NULL;
	bundle->count = 0;
}

static bool frame_pop_shared(struct frame_pool *pool, struct frame_bundle *bundle)
{
	u64 frame, word, tag;
	s64 head;

	/* The tag must not come round between the read and the exchange. */
	preempt_disable();
	head = atomic64_read(&pool->shared);
	do {
		frame = head & FRAME_MASK;
		if (!frame)
			break;
		word = READ_ONCE(pfn_to_page(frame)->private);
		tag = (u64)head >> FRAME_BITS;
	} while (!atomic64_try_cmpxchg(&pool->shared, &head, frame_pack(word & FRAME_MASK, tag)));
	preempt_enable();
	if (!frame)
		return false;
	set_page_private(pfn_to_page(frame), 0);
	bundle->stack = frame_memory(frame);
	bundle->count = word >> FRAME_BITS;
	return true;
}

/* Moves numbers from one stack to the other, and clears them where they were. */
static void frame_bundle_move(struct frame_bundle *from, struct frame_bundle *to,
			      unsigned int count)
{
	from->count -= count;
	memcpy(to->stack + to->count, from->stack + from->count, count * sizeof(u64));
	memset(from->stack + from->count, 0, count * sizeof(u64));
	to->count += count;
}

static void frame_push(struct frame_pool *pool, struct frame_bundle *bundle, u64 frame)
{
	if (bundle->stack && bundle->count == FRAME_BUNDLE)
		frame_push_shared(pool, bundle);
	if (bundle->stack)
		bundle->stack[bundle->count++] = frame;
	else
		bundle->stack = frame_memory(frame);
}

/* Keeps or gives back the frames of a bundle of one of the designs for comparison. */
static void frame_drain(struct frame_pool *pool, struct frame_lane *lane,
			struct frame_bundle *bundle)
{
	if (pool->design == FRAMES_STEALING)
		frame_steal_drain(lane, bundle);
	else
		frame_kernel_drain(pool, bundle);
}

void __frame_take_end(struct frame_pool *pool, struct frame_lane *lane,
		      struct frame_bundle *bundle)
{
	frame_drain(pool, lane, bundle);
}

void frame_take_back(struct frame_pool *pool, struct frame_lane *lane,
		     struct frame_bundle *bundle, u64 frame)
{
	if (unlikely(pool->blocks) && frame_block_take_back(pool, lane, frame))
		return;
	if (pool->design == FRAMES_BUNDLES) {
		frame_push(pool, bundle, frame);
		return;
	}
	if (bundle->count == FRAME_BUNDLE)
		frame_drain(pool, lane, bundle);
	bundle->stack[bundle->count++] = frame;
}

void frame_take_back_one(struct frame_pool *pool, struct frame_lane *lane, u64 frame)
{
	struct frame_bundle bundle;

	frame_take_begin(pool, lane, &bundle, 0);
	frame_take_back(pool, lane, &bundle, frame);
	frame_take_end(pool, lane, &bundle);
}

static bool frame_take_idle(struct frame_pool *pool, struct frame_lane *lane,
			    struct frame_bundle *bundle)
{
	unsigned int first = lane - pool->lanes;
	unsigned int i;

	for (i = 1; i < pool->count; i++) {
		struct frame_lane *other = &pool->lanes[(first + i) % pool->count];

		if (!atomic64_read(&other->idle))
			continue;
		*bundle = frame_unpack(atomic64_xchg(&other->idle, 0));
		if (bundle->stack)
			return true;
	}
	return false;
}

/* Takes a frame that was pinned when it was freed, and no longer is. */
static bool frame_take_unpinned(struct frame_pool *pool, struct frame_bundle *bundle)
{
	struct page *page, *next;
	bool found = false;

	if (!READ_ONCE(pool->pinned_count))
		return false;
	spin_lock(&pool->lock);
	list_for_each_entry_safe(page, next, &pool->pinned, lru) {
		if (!frame_is_unpinned(pool, page))
			continue;
		frame_push(pool, bundle, page_to_pfn(page));
		found = true;
		break;
	}
	spin_unlock(&pool->lock);
	return found;
}

static u64 frame_take_otherwise(struct frame_pool *pool, struct frame_lane *lane,
				struct frame_bundle *bundle)
{
	bool filled;

	lane->refills++;
	if (pool->design == FRAMES_STEALING)
		filled = frame_steal_fill(pool, lane, bundle) || frame_take_unpinned(pool, bundle);
	else
		filled = frame_kernel_fill(pool, bundle);
	return filled ? frame_take(pool, lane, bundle) : 0;
}

/*
 * Counts the frames that no user has and no lane can take, because something has pinned them for
 * long. While transfers are under way the answer is none, as transfers release their frames. A
 * caller that looks for frames after this finds those of transfers that have ended by now.
 */
static u64 frame_count_aside(struct frame_pool *pool)
{
	u64 pinned = READ_ONCE(pool->pinned_count), of_blocks = READ_ONCE(pool->blocks_pinned);

	smp_rmb(); /* the counts are read before the holders */
	return pinned > of_blocks && !atomic_read(&pool->holders) ? pinned - of_blocks : 0;
}

/*
 * Other threads, which may have lost their CPU, may have free frames in hand, and transfers may
 * have frames pinned. This waits a moment for them. False: there are no such frames, or the wait
 * has taken too long. Frames that were set aside before the caller looked count if they still are.
 * A thread that reclaims memory does not wait: it may be the one that has the frames in hand.
 */
static bool frame_wait_for_others(struct frame_pool *pool, u64 aside, unsigned int attempt)
{
	aside = min_t(u64, aside, frame_count_aside(pool));
	if (frame_pool_lent(pool) + aside >= READ_ONCE(pool->frames) ||
	    attempt == FRAME_ATTEMPTS || (current->flags & PF_MEMALLOC) ||
	    fatal_signal_pending(current))
		return false;
	if (attempt < FRAME_ATTEMPTS / 10)
		cond_resched();
	else
		usleep_range(100, 200);
	return true;
}

/* The slow path of taking a frame: the stack of the lane's bundle is empty. */
u64 __frame_take(struct frame_pool *pool, struct frame_lane *lane, struct frame_bundle *bundle)
{
	unsigned int attempt = 0;
	u64 frame, aside;

	if (pool->design != FRAMES_BUNDLES)
		return frame_take_otherwise(pool, lane, bundle);
	while (!bundle->stack) {
		lane->refills++;
		aside = frame_count_aside(pool);
		smp_rmb(); /* counted before the search */
		if (frame_pop_shared(pool, bundle) || frame_take_idle(pool, lane, bundle) ||
		    frame_take_unpinned(pool, bundle))
			break;
		if (!frame_wait_for_others(pool, aside, attempt++))
			return 0;
	}
	if (bundle->count)
		return frame_take(pool, lane, bundle);
	frame = frame_of(bundle->stack);
	bundle->stack = NULL;
	return frame;
}

/* The slow path of taking one frame. The word is what the lane's bundle was. */
u64 __frame_take_one(struct frame_pool *pool, struct frame_lane *lane, u64 word)
{
	struct frame_bundle bundle = frame_unpack(word);
	u64 frame;

	if (pool->design != FRAMES_BUNDLES)
		bundle.stack = lane->scratch;
	bundle.want = 1;
	frame = __frame_take(pool, lane, &bundle);
	frame_take_end(pool, lane, &bundle);
	return frame;
}

/* Whether something holds one of the frames. The pool has one reference to each. */
static bool frame_any_held(const struct frame_bundle *bundle)
{
	const u64 *frame = bundle->stack, *end = frame + bundle->count;
	u64 references = 0;

	while (frame < end)
		references += page_ref_count(pfn_to_page(*frame++));
	return references != bundle->count;
}

/* Sets aside the pending frames that something holds. */
static noinline void frame_set_held_aside(struct frame_pool *pool, struct frame_lane *lane)
{
	struct frame_bundle *bundle = &lane->pending;
	unsigned int i;

	for (i = bundle->count; i--;) {
		struct page *page = pfn_to_page(bundle->stack[i]);

		if (!frame_is_held(page))
			continue;
		spin_lock(&pool->lock);
		frame_set_aside(pool, page);
		lane->block_given += pool->blocks && page_private(page);
		spin_unlock(&pool->lock);
		bundle->stack[i] = bundle->stack[--bundle->count];
		bundle->stack[bundle->count] = 0;
	}
}

/* Merges the lane's pending frames into its bundle. */
static void frame_settle_pending(struct frame_pool *pool, struct frame_lane *lane)
{
	struct frame_bundle more = lane->pending, less;

	if (!more.count)
		return;
	frame_take_begin(pool, lane, &less, 0);
	if (less.stack && less.count > more.count)
		swap(less, more);
	if (less.stack && more.count + less.count <= FRAME_BUNDLE) {
		/*
		 * The fuller stack gets all numbers. The other one is the next stack of pending
		 * frames.
		 */
		frame_bundle_move(&less, &more, less.count);
		lane->pending = less;
	} else {
		if (less.stack) {
			frame_bundle_move(&less, &more, FRAME_BUNDLE - more.count);
			frame_push_shared(pool, &more);
			more = less;
		}
		lane->pending.stack = frame_memory(more.stack[--more.count]);
		lane->pending.count = 0;
		more.stack[more.count] = 0;
	}
	frame_take_end(pool, lane, &more);
}

/*
 * Frees the pending frames, or sets them aside, after the flush and after secondary MMUs were told.
 */
void frame_settle(struct frame_pool *pool, struct frame_lane *lane)
{
	/* The kernel keeps track of references to frames that go back to it. */
	if (pool->design != FRAMES_FROM_KERNEL && unlikely(frame_any_held(&lane->pending)))
		frame_set_held_aside(pool, lane);
	if (unlikely(pool->blocks))
		frame_blocks_collect(pool, lane, &lane->pending);
	if (pool->design == FRAMES_BUNDLES)
		frame_settle_pending(pool, lane);
	else
		frame_drain(pool, lane, &lane->pending);
}

/*
 * Counts the frames that users have in hand, as far as they have said: there are at least so many.
 * A frame that changes hands meanwhile may be given before this reads and taken again after that,
 * and must not count twice. So taken frames are read first. Frames of blocks, which are subtracted,
 * are read in the opposite order.
 */
static u64 frame_count_lent(struct frame_pool *pool, bool blocks)
{
	u64 taken = 0, given = 0;
	unsigned int i;

	for (i = 0; i < pool->count; i++) {
		const struct frame_lane *lane = &pool->lanes[i];

		taken += READ_ONCE(lane->taken) + (blocks ? 0 : READ_ONCE(lane->block_given));
	}
	smp_rmb(); /* taken frames are read first */
	for (i = 0; i < pool->count; i++) {
		const struct frame_lane *lane = &pool->lanes[i];

		given += READ_ONCE(lane->given) + (blocks ? 0 : READ_ONCE(lane->block_taken));
	}
	return taken > given ? taken - given : 0;
}

u64 frame_pool_resident(struct frame_pool *pool)
{
	return frame_count_lent(pool, true);
}

u64 frame_pool_lent(struct frame_pool *pool)
{
	return frame_count_lent(pool, false);
}

static struct page *frame_from_kernel(struct frame_pool *pool)
{
	struct page *page = alloc_page(FRAME_GFP);

	if (page) {
		spin_lock(&pool->lock);
		list_add(&page->lru, &pool->all);
		spin_unlock(&pool->lock);
	}
	return page;
}

static void frame_to_kernel(struct frame_pool *pool, struct page *page)
{
	spin_lock(&pool->lock);
	list_del(&page->lru);
	spin_unlock(&pool->lock);
	put_page(page);
}

u64 frame_pool_resize(struct frame_pool *pool, struct frame_lane *lane, u64 frames)
{
	struct frame_bundle bundle;
	struct page *page;
	u64 frame;

	if (pool->design == FRAMES_FROM_KERNEL) {
		WRITE_ONCE(pool->frames, frames);
		return frames;
	}
	frame_take_begin(pool, lane, &bundle, 1);
	while (pool->frames < frames && !fatal_signal_pending(current)) {
		page = frame_from_kernel(pool);
		if (!page)
			break;
		frame_take_back(pool, lane, &bundle, page_to_pfn(page));
		WRITE_ONCE(pool->frames, pool->frames + 1);
		cond_resched();
	}
	while (pool->frames > frames) {
		frame = frame_take(pool, lane, &bundle);
		if (!frame)
			break;
		frame_to_kernel(pool, pfn_to_page(frame));
		WRITE_ONCE(pool->frames, pool->frames - 1);
		cond_resched();
	}
	frame_take_end(pool, lane, &bundle);
	return pool->frames;
}

static bool frame_lane_init(struct frame_pool *pool, struct frame_lane *lane)
{
	bool needs_scratch = pool->design != FRAMES_BUNDLES;
	struct page *pending = frame_from_kernel(pool);
	struct page *scratch = needs_scratch ? frame_from_kernel(pool) : NULL;

	if (!pending || (needs_scratch && !scratch))
		return false;
	spin_lock_init(&lane->lock);
	lane->pending.stack = page_address(pending);
	lane->scratch = scratch ? page_address(scratch) : NULL;
	return true;
}

/* Fills the pool with the frames of its users. */
static bool frame_pool_fill(struct frame_pool *pool)
{
	struct frame_bundle bundle = {};
	struct page *page;
	u64 i;

	for (i = 0; i < pool->frames; i++) {
		page = fatal_signal_pending(current) ? NULL : frame_from_kernel(pool);
		if (!page)
			return false;
		if (pool->design == FRAMES_STEALING) {
			frame_steal_add(&pool->lanes[i % pool->count], page);
			continue;
		}
		frame_push(pool, &bundle, page_to_pfn(page));
		if (!(i % FRAME_BUNDLE))
			cond_resched();
	}
	if (bundle.stack)
		frame_push_shared(pool, &bundle);
	return true;
}

/* Takes the pool's frames from the kernel, zeroed. */
int frame_pool_init(struct frame_pool *pool, enum frame_design design, u64 frames,
		    unsigned int lanes)
{
	unsigned int lane;

	spin_lock_init(&pool->lock);
	INIT_LIST_HEAD(&pool->all);
	INIT_LIST_HEAD(&pool->pinned);
	atomic64_set(&pool->shared, 0);
	atomic64_set(&pool->outstanding, 0);
	atomic_set(&pool->holders, 0);
	pool->lanes = kvcalloc(lanes, sizeof(*pool->lanes), GFP_KERNEL_ACCOUNT);
	if (!pool->lanes)
		return -ENOMEM;
	pool->design = design;
	pool->frames = frames;
	pool->count = lanes;
	for (lane = 0; lane < lanes; lane++)
		if (!frame_lane_init(pool, &pool->lanes[lane]))
			goto failed;
	if (design == FRAMES_FROM_KERNEL || frame_pool_fill(pool))
		return 0;
failed:
	frame_pool_destroy(pool);
	return fatal_signal_pending(current) ? -EINTR : -ENOMEM;
}

/* Gives all frames back, wherever they are. Nothing maps them any more. */
void frame_pool_destroy(struct frame_pool *pool)
{
	struct page *page, *next;

	if (!pool->lanes)
		return;
	list_splice_init(&pool->pinned, &pool->all);
	list_for_each_entry_safe(page, next, &pool->all, lru) {
		list_del(&page->lru);
		set_page_private(page, 0);
		/* Whatever has the page pinned still keeps it alive. */
		put_page(page);
		cond_resched();
	}
	kvfree(pool->blocks);
	pool->blocks = NULL;
	pool->blocks_free = 0;
	pool->free_block = 0;
	pool->block_count = 0;
	pool->blocks_pinned = 0;
	pool->blocks_loose = 0;
	kvfree(pool->lanes);
	pool->lanes = NULL;
}
