// SPDX-License-Identifier: GPL-2.0
/* Transfers between a surface and its backing file. See transfer.h for what holds. */

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/bvec.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uio.h>

#include "exmap/transfer.h"
#include "trace.h"

/* Pages of the longest transfer: 1 MiB. */
#define TRANSFER_PAGES	256

bool transfer_is_possible(struct exmap *exmap, bool write)
{
	return exmap->backing && exmap->backing->f_mode & (write ? FMODE_WRITE : FMODE_READ);
}

struct transfer_batch *transfer_batch(struct exmap_interface *interface)
{
	if (unlikely(!interface->batch))
		interface->batch = kmalloc(sizeof(*interface->batch), GFP_KERNEL_ACCOUNT);
	return interface->batch;
}

static void begin(struct transfer_batch *batch, struct exmap *exmap, unsigned int index)
{
	batch->exmap = exmap;
	batch->index = index;
	batch->holds = false;
	batch->over_zeros = false;
	batch->has_gap = false;
	batch->short_one = NULL;
	INIT_LIST_HEAD(&batch->transfers);
	atomic_set(&batch->left, 1);
	batch->finished = NULL;
	batch->state = BATCH_WAITED_FOR;
	init_completion(&batch->done);
	frame_take_begin(&exmap->pool, &exmap->pool.lanes[index], &batch->bundle, 0);
}

static struct transfer *add_transfer(struct transfer_batch *batch, enum transfer_kind kind,
				     struct page_range range, struct exmap_result *result)
{
	unsigned int room = min_t(unsigned int, range.count, TRANSFER_PAGES);
	struct transfer *transfer = &batch->single;

	if (room == 1 && list_empty(&batch->transfers)) {
		transfer->pages = &batch->single_page;
	} else {
		transfer = kmalloc(sizeof(*transfer) + room * sizeof(*transfer->pages),
				   GFP_KERNEL_ACCOUNT);
		if (!transfer) {
			result->error = -ENOMEM;
			return NULL;
		}
		transfer->pages = (struct bio_vec *)(transfer + 1);
	}
	transfer->count = 0;
	transfer->outcome = 0;
	transfer->batch = batch;
	transfer->result = result;
	transfer->kind = kind;
	transfer->page = range.page;
	list_add_tail(&transfer->node, &batch->transfers);
	return transfer;
}

static void end_transfer(struct transfer *transfer)
{
	list_del(&transfer->node);
	if (transfer != &transfer->batch->single)
		kfree(transfer);
}

static void add_page(struct transfer *transfer, struct page *page)
{
	transfer->pages[transfer->count++] = (struct bio_vec){ .bv_page = page,
							       .bv_len = PAGE_SIZE };
}

/*
 * A thread that frees the page either finds it held, or we find it gone: both look at what the
 * other does after they have done their own.
 */
struct page *transfer_hold(struct exmap *exmap, u64 number)
{
	struct page *page;
	u64 frame;

	for (;;) {
		frame = exmap_frame(exmap, number);
		if (!frame)
			return NULL;
		page = pfn_to_page(frame);
		/* The pool may have shrunk since, by this very frame. */
		if (!get_page_unless_zero(page))
			continue;
		smp_mb__after_atomic(); /* held before we look again */
		if (exmap_frame(exmap, number) == frame)
			return page;
		put_page(page);
	}
}

static struct page *hold(struct transfer_batch *batch, u64 number)
{
	if (!batch->holds) {
		atomic_inc(&batch->exmap->pool.holders);
		smp_mb__after_atomic(); /* said before we look; see exmap_may_be_pinned() */
		batch->holds = true;
	}
	return transfer_hold(batch->exmap, number);
}

/*
 * Plans to read what of the range is not there, and with refresh what is there as well. A page for
 * which there is no frame ends the range.
 */
static void fill(struct transfer_batch *batch, struct page_range range, bool refresh,
		 struct exmap_result *result)
{
	struct exmap *exmap = batch->exmap;
	struct frame_lane *lane = &exmap->pool.lanes[batch->index];
	struct transfer *transfer = NULL;

	for (; range.count; range.page++, range.count--) {
		bool is_huge;
		u64 *leaf = exmap_make_leaf(exmap, range.page, &is_huge);
		enum transfer_kind kind = TRANSFER_FILL;
		struct page *page = NULL;
		u64 frame = 0;

		if (!leaf && !is_huge) {
			result->error = -ENOMEM;
			return;
		}
		/* An entry that is none is not looked into any further. */
		if (!leaf || (READ_ONCE(*leaf) && exmap_frame(exmap, range.page))) {
			page = refresh ? hold(batch, range.page) : NULL;
			kind = TRANSFER_REFRESH;
			if (!page) {
				transfer = NULL;
				batch->has_gap = true;
				continue;
			}
		}
		if (!transfer || transfer->kind != kind || transfer->count == TRANSFER_PAGES)
			transfer = add_transfer(batch, kind, range, result);
		if (transfer && kind == TRANSFER_FILL) {
			frame = frame_take(&exmap->pool, lane, &batch->bundle);
			page = frame ? pfn_to_page(frame) : NULL;
			lane->taken += frame != 0;
		}
		if (!transfer || !page) {
			if (page)
				put_page(page);
			result->error = -ENOMEM;
			return;
		}
		add_page(transfer, page);
	}
}

static void let_go(struct transfer *transfer)
{
	unsigned int i;

	for (i = 0; i < transfer->count; i++)
		put_page(transfer->pages[i].bv_page);
	transfer->count = 0;
}

/* Plans to write the range, all of which must be there. */
static void write(struct transfer_batch *batch, struct page_range range,
		  struct exmap_result *result)
{
	struct list_head *before = batch->transfers.prev;
	struct transfer *transfer = NULL;

	for (; range.count; range.page++, range.count--) {
		struct page *page = hold(batch, range.page);

		if (!page) {
			result->error = -ENOENT;
			break;
		}
		if (!transfer || transfer->count == TRANSFER_PAGES)
			transfer = add_transfer(batch, TRANSFER_WRITE, range, result);
		if (!transfer) {
			put_page(page);
			break;
		}
		add_page(transfer, page);
	}
	/* Nothing of a range that is not there as a whole. */
	while (result->error && batch->transfers.prev != before) {
		transfer = list_last_entry(&batch->transfers, struct transfer, node);
		let_go(transfer);
		end_transfer(transfer);
	}
}

void transfer_plan(struct transfer_batch *batch, struct exmap *exmap, unsigned int index,
		   enum transfer_kind kind, const struct page_range *ranges,
		   struct exmap_result *results, unsigned int count)
{
	unsigned int i;

	begin(batch, exmap, index);
	memset(results, 0, count * sizeof(*results));
	for (i = 0; i < count; i++) {
		if (kind == TRANSFER_WRITE)
			write(batch, ranges[i], &results[i]);
		else
			fill(batch, ranges[i], kind == TRANSFER_REFRESH, &results[i]);
	}
}

unsigned int transfer_plan_new(struct transfer_batch *batch, struct exmap *exmap,
			       unsigned int index, const struct page_range *ranges,
			       struct exmap_result *results, unsigned int count)
{
	unsigned int i;

	begin(batch, exmap, index);
	for (i = 0; i < count; i++) {
		results[i] = (struct exmap_result){};
		fill(batch, ranges[i], false, &results[i]);
		if (batch->has_gap || results[i].error)
			return i + 1;
	}
	return count;
}

static void one_less(struct transfer_batch *batch)
{
	if (!atomic_dec_and_test(&batch->left))
		return;
	if (batch->finished)
		batch->finished(batch);
	else if (cmpxchg(&batch->state, BATCH_WAITED_FOR, BATCH_DONE) == BATCH_ABANDONED)
		queue_work(batch->exmap->work, &batch->work);
	else
		complete(&batch->done);
}

static void end(struct transfer *transfer, long outcome)
{
	transfer->outcome = outcome;
	trace_exmap_transfer(transfer->batch->index, transfer->page, transfer->count, outcome);
	one_less(transfer->batch);
}

static void completed(struct kiocb *kiocb, long outcome)
{
	struct transfer *transfer = container_of(kiocb, struct transfer, kiocb);

	if (transfer->kind == TRANSFER_WRITE)
		kiocb_end_write(kiocb);
	end(transfer, outcome);
}

static void submit(struct transfer *transfer, struct file *file, bool waits)
{
	struct kiocb *kiocb = &transfer->kiocb;
	bool write = transfer->kind == TRANSFER_WRITE;
	struct iov_iter iter;
	long outcome;

	init_sync_kiocb(kiocb, file);
	kiocb->ki_pos = transfer->page << PAGE_SHIFT;
	kiocb->ki_complete = waits ? NULL : completed;
	iov_iter_bvec(&iter, write ? WRITE : READ, transfer->pages, transfer->count,
		      (size_t)transfer->count << PAGE_SHIFT);
	if (write)
		kiocb->ki_flags |= IOCB_WRITE;
	outcome = write ? file_begin_write(file, kiocb, &iter) :
			  vfs_iocb_iter_read(file, kiocb, &iter);
	if (outcome != -EIOCBQUEUED)
		end(transfer, outcome);
}

static struct transfer *first_of(struct transfer_batch *batch)
{
	return list_first_entry_or_null(&batch->transfers, struct transfer, node);
}

/*
 * For a caller who waits for one transfer from or to a block device: the device's own wait is the
 * cheapest. It ends when the device answers, or is given up.
 */
static bool may_wait_inside(const struct exmap *exmap)
{
	return S_ISBLK(file_inode(exmap->backing)->i_mode);
}

static void submit_all(struct transfer_batch *batch)
{
	struct file *file = batch->exmap->backing;
	struct transfer *transfer;
	struct blk_plug plug;

	/* Others may have the lane's frames meanwhile. */
	frame_take_end(&batch->exmap->pool, &batch->exmap->pool.lanes[batch->index],
		       &batch->bundle);
	if (!batch->finished && list_is_singular(&batch->transfers) &&
	    may_wait_inside(batch->exmap) && first_of(batch)->count) {
		atomic_inc(&batch->left);
		submit(first_of(batch), file, true);
	} else {
		blk_start_plug(&plug);
		list_for_each_entry(transfer, &batch->transfers, node) {
			if (!transfer->count)
				continue;
			atomic_inc(&batch->left);
			submit(transfer, file, false);
		}
		blk_finish_plug(&plug);
	}
	/* The batch may be gone after this. */
	one_less(batch);
}

/* Brings what was read to the surface; what was not, or comes too late, goes back to the pool. */
static unsigned int publish(struct transfer_batch *batch, struct transfer *transfer,
			    unsigned int good)
{
	struct exmap *exmap = batch->exmap;
	struct frame_lane *lane = &exmap->pool.lanes[batch->index];
	unsigned int i, published = 0;

	for (i = 0; i < transfer->count; i++) {
		u64 frame = page_to_pfn(transfer->pages[i].bv_page);
		u64 page = transfer->page + i;
		bool placed = false, is_huge = true;
		/* The table of the page may have been empty, and pruned, meanwhile. */
		u64 *leaf = i < good ? exmap_make_leaf(exmap, page, &is_huge) : NULL;

		if (!leaf && !is_huge && !transfer->result->error)
			transfer->result->error = -ENOMEM;
		/* Or it has become part of 2 MiB meanwhile. */
		while (!placed && leaf && !exmap_has_frame(exmap, READ_ONCE(*leaf))) {
			if (!exmap_wait(exmap, leaf, page))
				break;
			placed = exmap_place(exmap, leaf, page, frame, &batch->over_zeros);
		}
		if (placed) {
			published++;
			continue;
		}
		batch->has_gap |= i < good;
		frame_take_back(&exmap->pool, lane, &batch->bundle, frame);
		lane->given++;
	}
	return published;
}

static void conclude(struct transfer_batch *batch, struct transfer *transfer)
{
	struct exmap_interface *interface = &batch->exmap->interface[batch->index];
	unsigned int good = transfer->outcome < 0 ? 0 : transfer->outcome >> PAGE_SHIFT;
	struct exmap_result *result = transfer->result;

	batch->has_gap |= good && batch->short_one == result;
	if (good < transfer->count) {
		batch->short_one = result;
		if (!result->error)
			result->error = transfer->outcome < 0 ? transfer->outcome :
					transfer->kind == TRANSFER_WRITE ? -EIO : -ENODATA;
	}
	if (transfer->kind == TRANSFER_FILL)
		good = publish(batch, transfer, good);
	else
		let_go(transfer);
	result->pages += good;
	if (transfer->kind == TRANSFER_WRITE)
		interface->written += good;
	else
		interface->read += good;
}

static void forget(struct transfer_batch *batch)
{
	struct transfer *transfer, *next;

	list_for_each_entry_safe(transfer, next, &batch->transfers, node)
		end_transfer(transfer);
	if (batch->holds)
		atomic_dec(&batch->exmap->pool.holders);
}

/* Concludes what has an outcome. The interface's lock is held. */
void transfer_conclude(struct transfer_batch *batch, struct mm_struct *mm)
{
	struct exmap *exmap = batch->exmap;
	struct frame_lane *lane = &exmap->pool.lanes[batch->index];
	struct transfer *transfer;

	frame_take_begin(&exmap->pool, lane, &batch->bundle, 0);
	list_for_each_entry(transfer, &batch->transfers, node)
		conclude(batch, transfer);
	frame_take_end(&exmap->pool, lane, &batch->bundle);
	if (batch->over_zeros)
		exmap_flush_zeros(exmap, &exmap->interface[batch->index], mm);
	forget(batch);
}

/*
 * Concludes a batch in which all went well and nobody was in the way: then entries of page tables
 * change, and nothing else. False: something is left.
 */
bool transfer_conclude_quickly(struct transfer_batch *batch)
{
	struct exmap *exmap = batch->exmap;
	struct transfer *transfer = first_of(batch);
	bool over_zeros = false;
	unsigned int i;

	if (!transfer || !list_is_singular(&batch->transfers) || exmap->zero_leaf ||
	    exmap->flags & VELLUM_EXMAP_LOCK_TABLES ||
	    transfer->kind != TRANSFER_FILL || transfer->result->error ||
	    transfer->outcome != (long)transfer->count << PAGE_SHIFT ||
	    transfer->page + transfer->count > exmap->mount.tail)
		return false;
	/* No interface's lock is held here: RCU keeps tables that are pruned meanwhile. */
	rcu_read_lock();
	for (i = 0; i < transfer->count; i++) {
		u64 page = transfer->page + i;
		u64 *leaf = pt_tree_leaf(&exmap->tree, page);

		if (!leaf || !exmap_place(exmap, leaf, page,
					  page_to_pfn(transfer->pages[i].bv_page), &over_zeros))
			break;
	}
	rcu_read_unlock();
	transfer->result->pages += i;
	/* A caller who waits has the interface's lock. */
	if (batch->finished)
		atomic64_add(i, &exmap->read_quickly);
	else
		exmap->interface[batch->index].read += i;
	if (i < transfer->count) {
		/* What is left begins with the page that somebody else has brought. */
		transfer->page += i;
		transfer->count -= i;
		transfer->outcome -= (long)i << PAGE_SHIFT;
		memmove(transfer->pages, transfer->pages + i,
			transfer->count * sizeof(*transfer->pages));
		return false;
	}
	forget(batch);
	return true;
}

void transfer_start(struct transfer_batch *batch, void (*finished)(struct transfer_batch *))
{
	batch->finished = finished;
	submit_all(batch);
}

/* The last step, after which the exmap's own queue and the module may go. */
static void end_abandoned(struct work_struct *work)
{
	struct transfer_batch *batch = container_of(work, struct transfer_batch, work);

	exmap_put(batch->exmap);
	kfree(batch);
	/* The module waits for its queue, and so for this function to return. */
	module_put(THIS_MODULE);
}

static void conclude_abandoned(struct work_struct *work)
{
	struct transfer_batch *batch = container_of(work, struct transfer_batch, work);
	struct exmap_interface *interface = &batch->exmap->interface[batch->index];

	/* The end of the last transfer may still be about to say so. */
	if (batch->state == BATCH_DONE)
		wait_for_completion(&batch->done);
	mutex_lock(&interface->lock);
	transfer_conclude(batch, batch->mm);
	mutex_unlock(&interface->lock);
	if (batch->mm)
		mmdrop(batch->mm);
	INIT_WORK(&batch->work, end_abandoned);
	queue_work(exmap_work, &batch->work);
}

/* The caller is to die, and what is under way goes on without it. */
static void abandon(struct transfer_batch *batch)
{
	struct exmap *exmap = batch->exmap;
	struct transfer *transfer;

	/* Results are looked at only by what concludes. */
	batch->nowhere = (struct exmap_result){};
	list_for_each_entry(transfer, &batch->transfers, node)
		transfer->result = &batch->nowhere;
	exmap->interface[batch->index].batch = NULL;
	batch->mm = exmap->zero_leaf ? current->mm : NULL;
	if (batch->mm)
		mmgrab(batch->mm);
	kref_get(&exmap->references);
	__module_get(THIS_MODULE);
	INIT_WORK(&batch->work, conclude_abandoned);
	/* Unless the last transfer has just ended, its end queues the work. */
	if (cmpxchg(&batch->state, BATCH_WAITED_FOR, BATCH_ABANDONED) == BATCH_DONE)
		queue_work(exmap->work, &batch->work);
}

/* As wait_for_completion_io(), which cannot be killed. */
static int wait_killable(struct completion *done)
{
	bool before = current->in_iowait;
	int error;

	current->in_iowait = true;
	error = wait_for_completion_killable(done);
	current->in_iowait = before;
	return error;
}

int transfer_finish(struct transfer_batch *batch)
{
	submit_all(batch);
	if (!try_wait_for_completion(&batch->done) && wait_killable(&batch->done)) {
		abandon(batch);
		return -EINTR;
	}
	if (!transfer_conclude_quickly(batch))
		transfer_conclude(batch, current->mm);
	return 0;
}

static long read_frame(struct exmap *exmap, const struct kiocb *caller, u64 page, u64 frame)
{
	struct bio_vec bytes = { .bv_page = pfn_to_page(frame), .bv_len = PAGE_SIZE };
	struct file *file = exmap->backing;
	struct kiocb kiocb = {
		.ki_filp = file,
		.ki_flags = file->f_iocb_flags,
		.ki_ioprio = caller->ki_ioprio,
		.ki_pos = page << PAGE_SHIFT,
	};
	struct iov_iter iter;
	long outcome;

	iov_iter_bvec(&iter, READ, &bytes, 1, PAGE_SIZE);
	outcome = vfs_iocb_iter_read(file, &kiocb, &iter);
	if (likely(outcome == PAGE_SIZE))
		return outcome;
	return outcome < 0 ? outcome : -ENODATA;
}

ssize_t transfer_read_page(struct exmap *exmap, unsigned int index, const struct kiocb *caller,
			   u64 page)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct frame_lane *lane = &exmap->pool.lanes[index];
	/* It stays: tables are pruned only while the interface is locked for that. */
	u64 *leaf = pt_tree_leaf(&exmap->tree, page);
	bool placed = false, over_zeros = false;
	long outcome;
	u64 frame;

	if (unlikely(!leaf || !may_wait_inside(exmap)))
		return -EAGAIN;
	if (unlikely(READ_ONCE(*leaf)))
		return exmap_has_frame(exmap, READ_ONCE(*leaf)) ? 0 : -EAGAIN;
	frame = frame_take_one(&exmap->pool, lane);
	if (unlikely(!frame))
		return -ENOMEM;
	lane->taken++;
	outcome = read_frame(exmap, caller, page, frame);
	trace_exmap_transfer(index, page, 1, outcome);
	while (likely(outcome > 0) && !placed && !exmap_has_frame(exmap, READ_ONCE(*leaf))) {
		if (unlikely(READ_ONCE(*leaf)) && !exmap_wait(exmap, leaf, page))
			break;
		placed = exmap_place(exmap, leaf, page, frame, &over_zeros);
	}
	if (unlikely(!placed)) {
		frame_take_back_one(&exmap->pool, lane, frame);
		lane->given++;
		return outcome < 0 ? outcome : 0;
	}
	if (unlikely(over_zeros))
		exmap_flush_zeros(exmap, interface, current->mm);
	interface->read++;
	return PAGE_SIZE;
}
