/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Transfers between pages of a surface and the same pages of its backing file: page n is at byte n
 * * 4096. The kernel reads into frames and writes from them directly. It does not walk the process'
 * page tables, and the pages of the surface need not be pinnable.
 *
 * A transfer is a run of pages. A batch is all that one call has asked for. All transfers of a
 * batch are under way at the same time if the file can do that (O_DIRECT).
 *
 * Invariants:
 *
 * - A page that is read for the first time comes to the surface when its data is there, and does
 *   not come if it could not be read.
 * - A page that is on the surface and takes part is held: it can be neither freed nor reused.
 * - A batch outlives its caller, which may be killed while the batch is under way: a file system
 *   that waits for a server (FUSE, NFS) may never give an answer. A wait inside the file system's
 *   own read_iter or write_iter is the file system's. A cached file, for example, is read there.
 */
#ifndef VELLUM_EXMAP_TRANSFER_H
#define VELLUM_EXMAP_TRANSFER_H

#include <linux/completion.h>
#include <linux/bvec.h>
#include <linux/list.h>
#include <linux/workqueue.h>

#include "exmap/exmap.h"

enum exmap_transfer_kind {
	TRANSFER_FILL,		/* read into frames, which then come to the surface */
	TRANSFER_REFRESH,	/* read into pages that are there */
	TRANSFER_WRITE,		/* write pages that are there */
};

struct exmap_transfer {
	struct kiocb		kiocb;
	struct exmap_transfer_batch	*batch;
	struct list_head	node;
	struct exmap_result	*result;	/* of the transfer's range */
	enum exmap_transfer_kind	kind;
	u64			page;
	unsigned int		count;
	long			outcome;	/* bytes, or an error */
	struct bio_vec		*pages;
};

/* The end of the last transfer and a killed caller each try to change the state first. */
enum exmap_batch_state {
	BATCH_WAITED_FOR,
	BATCH_DONE,		/* the caller concludes, or has its work do it */
	BATCH_ABANDONED,	/* the last transfer's end queues `work` */
};

struct exmap_transfer_batch {
	struct exmap		*exmap;
	unsigned int		index;		/* of the interface; its lock is held */
	struct frame_bundle	bundle;		/* of its lane */
	struct list_head	transfers;
	atomic_t		left;
	/* Called when all transfers have an outcome, in any context. NULL: the caller waits. */
	void			(*finished)(struct exmap_transfer_batch *batch);
	enum exmap_batch_state	state;		/* changes once, by compare-and-exchange */
	struct completion	done;
	bool			holds;		/* it holds pages of the surface */
	unsigned int		zeros;		/* EXMAP_ZEROS_* */
	bool			has_gap;	/* its pages may not be the range's first */
	struct exmap_result	*short_one;	/* the last range of which a transfer fell short */

	/* A transfer of one page, as most are. */
	struct exmap_transfer		single;
	struct bio_vec		single_page;

	/* Used after the caller was killed. */
	struct work_struct	work;
	struct mm_struct	*mm;		/* NULL: not needed */
	struct exmap_result	nowhere;
};

/* Whether there is a file that can be read, or written. */
bool exmap_transfer_is_possible(struct exmap *exmap, bool write);

/*
 * Returns a batch for exmap_transfer_finish(), which keeps it with the interface; NULL: no memory.
 */
struct exmap_transfer_batch *exmap_transfer_get_batch(struct exmap_interface *interface);

/*
 * Plans a batch for these ranges. TRANSFER_REFRESH reads the pages again that are there, and
 * TRANSFER_FILL leaves them alone.
 */
void exmap_transfer_plan(struct exmap_transfer_batch *batch, struct exmap *exmap,
			 unsigned int index, enum exmap_transfer_kind kind,
			 const struct exmap_range *ranges, struct exmap_result *results,
			 unsigned int count);

/*
 * The same with TRANSFER_FILL, up to the first range that cannot come as a whole, because a page of
 * it is there or because there is no frame. Returns the number of ranges, that one included.
 */
unsigned int exmap_transfer_plan_new(struct exmap_transfer_batch *batch, struct exmap *exmap,
				     unsigned int index, const struct exmap_range *ranges,
				     struct exmap_result *results, unsigned int count);

/*
 * Carries the batch out and waits for it. EINTR: the caller is to die, and must not read the batch
 * or the results.
 */
int exmap_transfer_finish(struct exmap_transfer_batch *batch);

/*
 * Reads a page that is not there for a caller that waits. It does all that a batch would do,
 * without a batch. The interface's lock is held. Returns the page's bytes; 0 if the page is there,
 * and stays as it is; an error; EAGAIN if it takes a batch, and nothing was done.
 */
ssize_t exmap_transfer_read_page(struct exmap *exmap, unsigned int index,
				 const struct kiocb *caller, u64 page);

/*
 * Starts a batch without waiting for it. When the batch is finished,
 * exmap_transfer_conclude_quickly() does what needs no lock. If something is left,
 * exmap_transfer_conclude() does the rest with the interface's lock held.
 */
void exmap_transfer_start(struct exmap_transfer_batch *batch,
			  void (*finished)(struct exmap_transfer_batch *));
bool exmap_transfer_conclude_quickly(struct exmap_transfer_batch *batch);
void exmap_transfer_conclude(struct exmap_transfer_batch *batch, struct mm_struct *mm);

/*
 * Holds the frame of a page that is there. The caller has raised the pool's count of holders. NULL:
 * there is no page.
 */
struct page *exmap_transfer_hold(struct exmap *exmap, u64 number);

#endif /* VELLUM_EXMAP_TRANSFER_H */
