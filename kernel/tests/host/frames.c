// SPDX-License-Identifier: GPL-2.0
/*
 * Threads take and give frames of one pool, each in a lane of its own, and look at each frame that
 * they get: no other thread may have it, and it may hold nothing that the pool has written.
 *
 *	frames DESIGN SEED
 */

#include "kernel.h"
#include "core/frames.h"

#define FRAMES	7000
#define LANES	4
#define ROUNDS	2000
#define MOST	700	/* frames that a thread has at a time */
#define BLOCKS	2

/* Frames of the pool, those of its lanes, and as many again for the design without a pool. */
struct page host_pages[2 * FRAMES];
char host_memory[2 * FRAMES][PAGE_SIZE] __attribute__((aligned(PAGE_SIZE)));

static pthread_mutex_t host_lock = PTHREAD_MUTEX_INITIALIZER;
static bool host_used[2 * FRAMES];
static u64 host_count, host_hint;

/* What users write; anything else but zeros is the pool's. */
#define OURS	0x5a5a5a5a5a5a5a5aULL

void (*host_meanwhile)(void);

static struct frame_pool pool;
static int owner[2 * FRAMES];	/* 0: no thread */
static u64 seed;

static void fail(const char *what, u64 frame)
{
	fprintf(stderr, "%s: frame %lu\n", what, frame);
	abort();
}

struct page *host_alloc_page(void)
{
	struct page *page = NULL;
	u64 frame, i;

	pthread_mutex_lock(&host_lock);
	for (i = 0; i < 2 * FRAMES && !page; i++) {
		frame = host_hint++ % (2 * FRAMES);
		if (frame && !host_used[frame])
			page = &host_pages[frame];
	}
	if (page) {
		host_used[page - host_pages] = true;
		host_count++;
		page->references = 1;
		page->private = 0;
		memset(page_address(page), 0, PAGE_SIZE);
	}
	pthread_mutex_unlock(&host_lock);
	return page;
}

/* In a row, at the end, where the others do not come so soon; each is given back alone. */
struct page *host_alloc_pages(unsigned int order)
{
	static u64 first = 2 * FRAMES;
	struct page *page;
	u64 i;

	first -= 1 << order;
	pthread_mutex_lock(&host_lock);
	for (i = first; i < first + (1 << order); i++) {
		if (host_used[i])
			fail("there is not so much in a row", i);
		host_used[i] = true;
		host_count++;
		page = &host_pages[i];
		page->references = 1;
		page->private = 0;
	}
	pthread_mutex_unlock(&host_lock);
	return &host_pages[first];
}

void host_put_page(struct page *page)
{
	pthread_mutex_lock(&host_lock);
	if (!host_used[page - host_pages])
		fail("freed twice", page - host_pages);
	host_used[page - host_pages] = false;
	host_count--;
	pthread_mutex_unlock(&host_lock);
}

static void got(u64 frame, int who)
{
	u64 *memory = page_address(pfn_to_page(frame));
	unsigned int i;

	if (__atomic_exchange_n(&owner[frame], who, __ATOMIC_ACQUIRE))
		fail("another thread has it", frame);
	for (i = 0; i < PAGE_SIZE / sizeof(u64); i++)
		if (memory[i] && memory[i] != OURS)
			fail("it holds what the pool has written", frame);
	memory[0] = memory[frame % 512] = memory[511] = OURS;
}

static u64 next(u64 *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static unsigned int take_one(struct frame_lane *lane, u64 *mine, int who, u64 refused)
{
	u64 frame = frame_take_one(&pool, lane);

	if (!frame)
		return 0;
	got(frame, who);
	if (refused && frame % refused == 0) {
		__atomic_store_n(&owner[frame], 0, __ATOMIC_RELEASE);
		frame_take_back_one(&pool, lane, frame);
		return 0;
	}
	WRITE_ONCE(lane->taken, lane->taken + 1);
	*mine = frame;
	return 1;
}

/* Up to so many, until one comes whose number the given one divides: that goes back unused. */
static unsigned int take_but(struct frame_lane *lane, u64 *mine, unsigned int want, int who,
			     u64 refused)
{
	struct frame_bundle bundle;
	unsigned int have = 0;
	u64 frame;

	if (want == 1)
		return take_one(lane, mine, who, refused);
	frame_take_begin(&pool, lane, &bundle, want);
	while (have < want && (frame = frame_take(&pool, lane, &bundle))) {
		got(frame, who);
		if (refused && frame % refused == 0) {
			__atomic_store_n(&owner[frame], 0, __ATOMIC_RELEASE);
			frame_take_back(&pool, lane, &bundle, frame);
			break;
		}
		WRITE_ONCE(lane->taken, lane->taken + 1);
		mine[have++] = frame;
	}
	frame_take_end(&pool, lane, &bundle);
	return have;
}

static unsigned int take(struct frame_lane *lane, u64 *mine, unsigned int want, int who)
{
	return take_but(lane, mine, want, who, 0);
}

static unsigned int give(struct frame_lane *lane, u64 *mine, unsigned int have, unsigned int count)
{
	bool alone = count == 1;

	while (count-- && have) {
		u64 frame = mine[--have];

		__atomic_store_n(&owner[frame], 0, __ATOMIC_RELEASE);
		WRITE_ONCE(lane->given, lane->given + 1);
		if (alone)
			frame_settle_one(&pool, lane, frame);
		else if (frame_pend(lane, frame))
			frame_settle(&pool, lane);
	}
	frame_settle(&pool, lane);
	return have;
}

/* A block: all of it is the thread's; it goes back as a whole, or frame by frame among others. */
static void use_block(struct frame_lane *lane, int who, bool whole)
{
	u64 i, frame = frame_block_take(&pool), mine[FRAME_BLOCK];

	if (!frame)
		return;
	WRITE_ONCE(lane->block_taken, lane->block_taken + FRAME_BLOCK);
	WRITE_ONCE(lane->taken, lane->taken + FRAME_BLOCK);
	for (i = 0; i < FRAME_BLOCK; i++)
		got(mine[i] = frame + i, who);
	if (!whole) {
		give(lane, mine, FRAME_BLOCK, FRAME_BLOCK);
		return;
	}
	for (i = 0; i < FRAME_BLOCK; i++)
		__atomic_store_n(&owner[frame + i], 0, __ATOMIC_RELEASE);
	WRITE_ONCE(lane->given, lane->given + FRAME_BLOCK);
	WRITE_ONCE(lane->block_given, lane->block_given + FRAME_BLOCK);
	frame_block_give(&pool, frame);
}

static void *work(void *argument)
{
	int who = (int)(intptr_t)argument;
	struct frame_lane *lane = &pool.lanes[who - 1];
	u64 state = seed * 7919 + who, mine[MOST];
	unsigned int have = 0;
	int round;

	for (round = 0; round < ROUNDS; round++) {
		unsigned int size = next(&state) % 3 ? 512 : 5;
		unsigned int count = next(&state) % size + 1;

		if (pool.blocks && next(&state) % 8 == 0)
			use_block(lane, who, next(&state) % 2);
		if (next(&state) % 2)
			have += take_but(lane, mine + have,
					 min_t(unsigned int, count, MOST - have), who, 37);
		else
			have = give(lane, mine, have, count);
	}
	give(lane, mine, have, have);
	return NULL;
}

/* Every frame can be had, once. */
static void count_all(void)
{
	static u64 mine[2 * FRAMES];
	unsigned int found = take(&pool.lanes[0], mine, 2 * FRAMES, 99);

	if (found != pool.frames)
		fail("frames are lost", pool.frames - found);
	give(&pool.lanes[0], mine, found, found);
}

/*
 * Frames come back to a lane that has none: one of them becomes the next stack for pending frames,
 * and its number must not stay behind on the stack that is handed out at last.
 */
static void check_that_no_number_stays(void)
{
	static u64 mine[2 * FRAMES];
	unsigned int have = take(&pool.lanes[0], mine, 2 * FRAMES, 99);

	have = give(&pool.lanes[0], mine, have, 10);
	have += take(&pool.lanes[0], mine + have, 10, 1);
	give(&pool.lanes[0], mine, have, have);
}

/* All frames one by one, and back: none is lost, and no number stays behind on a stack. */
static void check_single_frames(void)
{
	static u64 mine[2 * FRAMES];
	unsigned int have = 0;

	while (take(&pool.lanes[0], mine + have, 1, 99))
		have++;
	if (have != pool.frames)
		fail("frames are lost", pool.frames - have);
	while (have)
		have = give(&pool.lanes[0], mine, have, 1);
	count_all();
}

/* Frames that the second lane has for what follows. */
static u64 spare[300];

/* One lane pops the bundle that is on top, another the next one, and the first comes back. */
static void pop_two_and_push_one(void)
{
	u64 rest[MOST], other[1];
	unsigned int have = take(&pool.lanes[1], rest, 214, 2);
	unsigned int one = take(&pool.lanes[2], other, 1, 3);

	give(&pool.lanes[1], spare, 300, 300);
	give(&pool.lanes[1], rest, have, have);
	give(&pool.lanes[2], other, one, one);
}

static void check_that_tags_tell_bundles_apart(void)
{
	u64 mine[1];

	if (take(&pool.lanes[1], spare, 300, 2) != 300)
		fail("frames are lost", 0);
	host_meanwhile = pop_two_and_push_one;
	give(&pool.lanes[3], mine, take(&pool.lanes[3], mine, 1, 4), 1);
	count_all();
}

/* What something has pinned while it is given back is kept aside, and comes back later. */
static void check_that_pinned_frames_come_back(void)
{
	static u64 mine[2 * FRAMES];
	unsigned int have = take(&pool.lanes[0], mine, 2 * FRAMES, 1);
	unsigned int i;

	for (i = 0; i < have; i += 3)
		host_pages[mine[i]].references++;
	give(&pool.lanes[0], mine, have, have);
	if (pool.pinned_count != (have + 2) / 3)
		fail("pinned frames are not kept aside", pool.pinned_count);
	for (i = 0; i < have; i += 3)
		host_pages[mine[i]].references--;
	count_all();
	if (pool.pinned_count)
		fail("frames that nothing pins are kept aside", pool.pinned_count);
}

/* A block is not whole while something holds one of its frames. */
static void check_that_held_blocks_come_back(void)
{
	u64 blocks[BLOCKS];
	unsigned int i;

	for (i = 0; i < BLOCKS; i++)
		blocks[i] = frame_block_take(&pool);
	host_pages[blocks[0] + 5].references++;
	for (i = 0; i < BLOCKS; i++)
		frame_block_give(&pool, blocks[i]);
	if (pool.blocks_free != BLOCKS - 1 || pool.blocks_pinned != 1)
		fail("a block is whole, and something holds a part of it", blocks[0]);
	host_pages[blocks[0] + 5].references--;
	for (i = 0; i < BLOCKS; i++) {
		blocks[i] = frame_block_take(&pool);
		if (!blocks[i])
			fail("a block that nothing holds does not come back", i);
	}
	for (i = 0; i < BLOCKS; i++)
		frame_block_give(&pool, blocks[i]);
}

static void *let_go_soon(void *pinned)
{
	usleep(20000);
	__atomic_fetch_sub(&((struct page *)pinned)->references, 1, __ATOMIC_RELEASE);
	__atomic_fetch_sub(&pool.holders.value, 1, __ATOMIC_RELEASE);
	return NULL;
}

/* What a transfer still has pinned is waited for; what is pinned for long is not. */
static void check_that_transfers_are_waited_for(void)
{
	static u64 mine[2 * FRAMES];
	unsigned int have = take(&pool.lanes[0], mine, 2 * FRAMES, 1);
	struct page *pinned = &host_pages[mine[have - 1]];
	pthread_t transfer;

	pinned->references++;
	give(&pool.lanes[0], mine, have, have);
	have = take(&pool.lanes[0], mine, pool.frames, 1);
	if (have != pool.frames - 1)
		fail("a pinned frame is handed out", have);
	give(&pool.lanes[0], mine, have, have);
	atomic_set(&pool.holders, 1);
	pthread_create(&transfer, NULL, let_go_soon, pinned);
	have = take(&pool.lanes[0], mine, pool.frames, 1);
	if (have != pool.frames)
		fail("a frame that a transfer had is not waited for", have);
	pthread_join(transfer, NULL);
	give(&pool.lanes[0], mine, have, have);
}

int main(int count, char **arguments)
{
	enum frame_design design = count > 1 ? atoi(arguments[1]) : FRAMES_BUNDLES;
	pthread_t threads[LANES];
	int i;

	seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
	if (frame_pool_init(&pool, design, FRAMES, LANES))
		return 1;
	check_single_frames();
	if (design == FRAMES_BUNDLES) {
		if (frame_blocks_init(&pool, BLOCKS) || pool.block_count != BLOCKS)
			return 1;
		check_that_tags_tell_bundles_apart();
		check_that_no_number_stays();
		check_that_transfers_are_waited_for();
		check_that_held_blocks_come_back();
	}
	if (design != FRAMES_FROM_KERNEL)
		check_that_pinned_frames_come_back();
	for (i = 0; i < LANES; i++)
		pthread_create(&threads[i], NULL, work, (void *)(intptr_t)(i + 1));
	for (i = 0; i < LANES; i++)
		pthread_join(threads[i], NULL);
	if (frame_pool_resident(&pool))
		fail("frames are missing", frame_pool_resident(&pool));
	if (pool.blocks_free != pool.block_count || pool.blocks_loose || frame_pool_lent(&pool))
		fail("blocks are missing", pool.blocks_free);
	count_all();
	frame_pool_destroy(&pool);
	if (host_count)
		fail("frames are not given back", host_count);
	return 0;
}
