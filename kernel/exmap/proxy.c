// SPDX-License-Identifier: GPL-2.0
/*
 * The descriptor as a proxy of the backing file (SIGMOD 2023, 4.3): pread and preadv bring pages
 * that are not there to the surface and read them, pwrite and pwritev write pages. The buffers are
 * parts of the surface, whose place says which part of the file is meant; so the offset is free to
 * name the interface, and a vector is scattered in the file as it is on the surface.
 *
 *	offset = interface | opcode << 8
 *
 * With the opcode ALLOC, pread and preadv bring pages and read nothing.
 */

#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uio.h>
#include <linux/workqueue.h>
#include <vellum/exmap_published.h>

#include "core/compat.h"
#include "exmap/exmap.h"
#include "exmap/transfer.h"

/* Segments of one call. */
struct segments {
	unsigned int		count;
	struct page_range	*ranges;
	struct exmap_result	*results;
};

/* The next segment as pages of the surface; it must be some whole ones. */
static int segment_pages(struct exmap *exmap, struct iov_iter *iter, struct page_range *range)
{
	unsigned long address = (unsigned long)segment_address(iter);
	size_t length = segment_length(iter);
	unsigned long start = exmap->mount.start;

	if (address < start || !PAGE_ALIGNED(address) || !PAGE_ALIGNED(length) ||
	    length >> PAGE_SHIFT > UINT_MAX)
		return -EINVAL;
	range->page = (address - start) >> PAGE_SHIFT;
	range->count = length >> PAGE_SHIFT;
	iov_iter_advance(iter, length);
	return exmap_contains(exmap, *range) ? 0 : -EINVAL;
}

static int read_segments(struct exmap *exmap, struct iov_iter *iter, struct segments *segments)
{
	unsigned long most = iter_is_iovec(iter) ? iter->nr_segs : 1;
	int error = 0;

	segments->count = 0;
	segments->ranges = kmalloc_array(most, sizeof(*segments->ranges), GFP_KERNEL_ACCOUNT);
	segments->results = kcalloc(most, sizeof(*segments->results), GFP_KERNEL_ACCOUNT);
	if (!segments->ranges || !segments->results)
		return -ENOMEM;
	while (!error && iov_iter_count(iter)) {
		/* Empty ones are skipped when the iterator moves. */
		if (WARN_ON_ONCE(segments->count == most))
			return -EINVAL;
		error = segment_pages(exmap, iter, &segments->ranges[segments->count++]);
	}
	return error;
}

/* Bytes of the segments before the first that failed; if it is the first, its error. */
static ssize_t bytes_done(const struct segments *segments)
{
	ssize_t bytes = 0;
	unsigned int i;

	for (i = 0; i < segments->count; i++) {
		if (segments->results[i].error)
			return bytes ?: segments->results[i].error;
		bytes += (ssize_t)segments->ranges[i].count << PAGE_SHIFT;
	}
	return bytes;
}

/* A call that returned before it was carried out. */
struct asynchronous {
	struct transfer_batch	batch;
	struct segments		segments;
	struct kiocb		*kiocb;
	struct mm_struct	*mm;		/* NULL: not needed */
	struct work_struct	work;
};

static void free_segments(struct segments *segments)
{
	kfree(segments->ranges);
	kfree(segments->results);
}

static void answer(struct asynchronous *call)
{
	struct kiocb *kiocb = call->kiocb;
	ssize_t outcome = bytes_done(&call->segments);

	free_segments(&call->segments);
	kfree(call);
	/* The exmap may be gone after this. */
	kiocb->ki_complete(kiocb, outcome);
}

static void conclude_later(struct work_struct *work)
{
	struct asynchronous *call = container_of(work, struct asynchronous, work);
	struct exmap_interface *interface = &call->batch.exmap->interface[call->batch.index];

	mutex_lock(&interface->lock);
	transfer_conclude(&call->batch, call->mm);
	mutex_unlock(&interface->lock);
	if (call->mm)
		mmdrop(call->mm);
	answer(call);
}

static void finished(struct transfer_batch *batch)
{
	struct asynchronous *call = container_of(batch, struct asynchronous, batch);

	if (transfer_conclude_quickly(batch))
		answer(call);
	else
		queue_work(exmap_work, &call->work);
}

static void plan(struct transfer_batch *batch, struct exmap *exmap, unsigned int index,
		 struct segments *segments, bool write)
{
	transfer_plan(batch, exmap, index, write ? TRANSFER_WRITE : TRANSFER_REFRESH,
		      segments->ranges, segments->results, segments->count);
}

/* Reads without waiting. The segments are the call's from here on. */
static ssize_t read_later(struct exmap *exmap, unsigned int index, struct segments *segments,
			  struct kiocb *kiocb)
{
	struct asynchronous *call = kzalloc(sizeof(*call), GFP_KERNEL_ACCOUNT);

	if (!call)
		return -ENOMEM;
	call->segments = *segments;
	*segments = (struct segments){};
	call->kiocb = kiocb;
	if (exmap->zero_leaf) {
		call->mm = current->mm;
		mmgrab(call->mm);
	}
	INIT_WORK(&call->work, conclude_later);
	plan(&call->batch, exmap, index, &call->segments, false);
	transfer_start(&call->batch, finished);
	return -EIOCBQUEUED;
}

static ssize_t transfer(struct exmap *exmap, unsigned int index, struct segments *segments,
			struct kiocb *kiocb, bool write)
{
	struct transfer_batch batch;

	if (!transfer_is_possible(exmap, write))
		return -EBADF;
	if (!write && !is_sync_kiocb(kiocb) && (exmap->backing->f_flags & O_DIRECT))
		return read_later(exmap, index, segments, kiocb);
	plan(&batch, exmap, index, segments, write);
	transfer_finish(&batch);
	return bytes_done(segments);
}

static ssize_t carry_out(struct exmap *exmap, unsigned int index, u64 opcode,
			 struct segments *segments, struct kiocb *kiocb, bool write)
{
	if (opcode == EXMAP_PUBLISHED_OP_ALLOC && !write) {
		exmap_alloc(exmap, index, segments->ranges, segments->results, segments->count);
		return bytes_done(segments);
	}
	if (opcode == EXMAP_PUBLISHED_OP_READ || (opcode == EXMAP_PUBLISHED_OP_WRITE && write))
		return transfer(exmap, index, segments, kiocb, write);
	return -EINVAL;
}

/* Whether the call may have to wait for something other than memory, or the interface. */
static bool may_wait(struct exmap *exmap, u64 opcode, bool write)
{
	return write || (opcode != EXMAP_PUBLISHED_OP_ALLOC &&
			 !(exmap->backing && (exmap->backing->f_flags & O_DIRECT)));
}

static ssize_t proxy(struct kiocb *kiocb, struct iov_iter *iter, bool write)
{
	struct exmap *exmap = exmap_of(kiocb->ki_filp);
	unsigned int index = kiocb->ki_pos & 0xff;
	u64 opcode = kiocb->ki_pos >> 8;
	struct segments segments = {};
	struct exmap_interface *interface = exmap_find_interface(exmap, index);
	bool nowait = kiocb->ki_flags & IOCB_NOWAIT;
	ssize_t outcome;

	if (IS_ERR(interface))
		return PTR_ERR(interface);
	if (!user_backed_iter(iter))
		return -EINVAL;
	if (nowait && may_wait(exmap, opcode, write))
		return -EAGAIN;
	outcome = read_segments(exmap, iter, &segments);
	if (!outcome)
		outcome = exmap_lock_interface(exmap, interface, !nowait);
	if (!outcome) {
		outcome = carry_out(exmap, index, opcode, &segments, kiocb, write);
		mutex_unlock(&interface->lock);
	}
	free_segments(&segments);
	return outcome;
}

ssize_t exmap_read_iter(struct kiocb *kiocb, struct iov_iter *iter)
{
	return proxy(kiocb, iter, false);
}

ssize_t exmap_write_iter(struct kiocb *kiocb, struct iov_iter *iter)
{
	return proxy(kiocb, iter, true);
}
