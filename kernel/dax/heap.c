// SPDX-License-Identifier: GPL-2.0
/* A heap's descriptor, VMA and notifier. heap.h describes heaps. */

#include <linux/anon_inodes.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_notifier.h"
#include "core/pt_pieces.h"
#include "core/pt_userfault.h"
#include "core/sized.h"
#include "dax/heap.h"

/* Zombies that are flushed together unless the program says otherwise: the paper's figure. */
#define DAX_HEAP_BATCH		33

/* The notifier. */

static struct dax_heap *dax_heap_of_notifier(struct mmu_notifier *notifier)
{
	return container_of(notifier, struct dax_heap, notifier);
}

/* From now on nothing is put in, and nothing is in when this returns. Must not sleep. */
static void dax_heap_close(struct dax_heap *heap)
{
	WRITE_ONCE(heap->closed, true);
	/* A thread that puts something in sees this, or its region is taken out. */
	smp_mb();
	dax_slots_take_out(heap, heap->start, heap->end);
}

static bool dax_heap_overlaps(const struct dax_heap *heap, const struct mmu_notifier_range *range)
{
	return range->start < heap->end && range->end > heap->start;
}

/* The core is about to walk page tables in the range. After an unmapping it frees them. */
static int dax_heap_invalidate_start(struct mmu_notifier *notifier,
				     const struct mmu_notifier_range *range)
{
	struct dax_heap *heap = dax_heap_of_notifier(notifier);

	if (!dax_heap_overlaps(heap, range))
		return 0;
	atomic_inc(&heap->invalidating);
	if (range->event == MMU_NOTIFY_UNMAP)
		WRITE_ONCE(heap->closed, true);
	smp_mb(); /* as in dax_heap_close() */
	dax_slots_take_out(heap, range->start, range->end);
	return 0;
}

static void dax_heap_invalidate_end(struct mmu_notifier *notifier,
				    const struct mmu_notifier_range *range)
{
	struct dax_heap *heap = dax_heap_of_notifier(notifier);

	if (dax_heap_overlaps(heap, range))
		atomic_dec(&heap->invalidating);
}

/* The process is ending. */
static void dax_heap_release_mm(struct mmu_notifier *notifier, struct mm_struct *mm)
{
	dax_heap_close(dax_heap_of_notifier(notifier));
}

static const struct mmu_notifier_ops dax_heap_notifier_ops = {
	.invalidate_range_start = dax_heap_invalidate_start,
	.invalidate_range_end = dax_heap_invalidate_end,
	.release = dax_heap_release_mm,
};

static int dax_heap_insert_notifier(void *data)
{
	struct dax_heap *heap = data;

	return __mmu_notifier_register(&heap->notifier, heap->mm);
}

/* The VMA. */

/* fork or mremap has made a copy, and is about to walk the page tables. The copy maps nothing. */
static void dax_heap_vm_open(struct vm_area_struct *vma)
{
	struct dax_heap *heap = vma->vm_private_data;

	if (heap)
		dax_heap_close(heap);
	vma->vm_private_data = NULL;
}

static void dax_heap_vm_close(struct vm_area_struct *vma)
{
	struct dax_heap *heap = vma->vm_private_data;

	if (!heap)
		return;
	vma->vm_private_data = NULL;
	dax_heap_close(heap);
	dax_detach_all(heap);
	mmu_notifier_unregister(&heap->notifier, heap->mm);
}

static int dax_heap_vm_mprotect(struct vm_area_struct *vma, unsigned long start,
				unsigned long end, unsigned long flags)
{
	return -EINVAL;
}

static vm_fault_t dax_heap_fault(struct vm_fault *vmf, bool is_mkwrite)
{
	struct dax_heap *heap = vmf->vma->vm_private_data;

	return heap ? dax_attachment_fault(heap, vmf, is_mkwrite) : VM_FAULT_SIGSEGV;
}

static vm_fault_t dax_heap_vm_fault(struct vm_fault *vmf)
{
	return dax_heap_fault(vmf, false);
}

/* A write to a page that the file system has shown for reading. */
static vm_fault_t dax_heap_vm_pfn_mkwrite(struct vm_fault *vmf)
{
	return dax_heap_fault(vmf, true);
}

static const struct vm_operations_struct dax_heap_vm_ops = {
	.open = dax_heap_vm_open,
	.close = dax_heap_vm_close,
	.may_split = pt_mount_vm_may_split,
	.mremap = pt_mount_vm_mremap,
	.mprotect = dax_heap_vm_mprotect,
	.fault = dax_heap_vm_fault,
	.pfn_mkwrite = dax_heap_vm_pfn_mkwrite,
};

/* A heap is mapped once in its life, also if that fails here. Other threads may use it already. */
static int dax_heap_start(struct dax_heap *heap, struct vm_area_struct *vma)
{
	int error;

	if (cmpxchg(&heap->mm, NULL, vma->vm_mm))
		return -EBUSY;
	/* Work that flushes for zombies may outlive the process. */
	mmgrab(heap->mm);
	heap->start = vma->vm_start;
	heap->end = vma->vm_end;
	heap->notifier.ops = &dax_heap_notifier_ops;
	error = pt_notifier_insert(dax_heap_insert_notifier, heap);
	if (error)
		return error;
	/* A thread that sees the count sees where the heap is. */
	smp_store_release(&heap->region_count, (heap->end - heap->start) / DAX_REGION_SIZE);
	return 0;
}

static int dax_heap_map(struct file *file, struct vm_area_struct *vma)
{
	struct dax_heap *heap = file->private_data;
	unsigned long len = vma->vm_end - vma->vm_start;
	unsigned long rights = VM_READ | (heap->writes ? VM_WRITE : 0);
	int error;

	if (vma->vm_flags & VM_EXEC)
		return -EACCES;
	if (!(vma->vm_flags & VM_MAYSHARE) || vma->vm_pgoff || len > VELLUM_DAX_MAX_EXTENT ||
	    !IS_ALIGNED(vma->vm_start | len, DAX_REGION_SIZE) ||
	    (vma->vm_flags & (VM_READ | VM_WRITE)) != rights)
		return -EINVAL;
	if (!pt_userfault_is_refused(vma->vm_mm))
		return -EOPNOTSUPP;
	error = dax_heap_start(heap, vma);
	if (error)
		return error;
	/* Without VM_PFNMAP and VM_IO no virtual machine takes references to pages. */
	pt_vma_change_flags(vma, VM_MIXEDMAP | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY |
				 VM_NOHUGEPAGE, VM_MAYEXEC);
	vma->vm_private_data = heap;
	vma->vm_ops = &dax_heap_vm_ops;
	return 0;
}

static unsigned long dax_heap_area(struct file *file, unsigned long addr, unsigned long len,
				   unsigned long pgoff, unsigned long flags)
{
	if (!len || !IS_ALIGNED(len, DAX_REGION_SIZE) || len > VELLUM_DAX_MAX_EXTENT)
		return -EINVAL;
	return pt_pieces_area(file, addr, len, pgoff, flags);
}

/* The file system. */

/* Asks with a copy of the VMA, whose flags the file system may change. */
static int dax_heap_ask_with(const struct vm_area_struct *vma, struct dax_attachment *attachment)
{
	struct file *file = attachment->file;
	struct vm_area_struct own = *vma;
	int error;

	own.vm_file = file;
	own.vm_ops = NULL;
	own.vm_private_data = NULL;
	own.vm_pgoff = attachment->page;
	error = file->f_op->mmap(file, &own);
	if (error)
		return error;
	attachment->operations = own.vm_ops;
	return own.vm_ops && own.vm_ops->fault ? 0 : -EOPNOTSUPP;
}

/* Asks the file system to map its file, with the locks that it may expect. */
static int dax_heap_ask_file(struct dax_heap *heap, struct dax_attachment *attachment)
{
	struct vm_area_struct *vma;
	int error = -ENXIO;

	if (mmap_write_lock_killable(heap->mm))
		return -EINTR;
	vma = find_vma(heap->mm, heap->start);
	if (vma && vma->vm_private_data == heap && !READ_ONCE(heap->closed)) {
		pt_vma_start_write(vma);
		error = dax_heap_ask_with(vma, attachment);
	}
	mmap_write_unlock(heap->mm);
	return error;
}

/* Every heap asks once, as the answer is the same for all files that can have a table. */
static int dax_heap_ask_once(struct dax_heap *heap, struct dax_attachment *attachment)
{
	struct file *file = attachment->file;
	int error = dax_heap_ask_file(heap, attachment);

	/* The file keeps the module, which the heap may outlive. */
	if (error || heap->operations)
		return error;
	heap->module = file_inode(file)->i_sb->s_type->owner;
	__module_get(heap->module);
	heap->file_operations = file->f_op;
	/* Whose operations these are is known before. */
	smp_store_release(&heap->operations, attachment->operations);
	return 0;
}

int dax_heap_ask(struct dax_heap *heap, struct dax_attachment *attachment)
{
	int error;

	/* Pairs with the release above. */
	attachment->operations = smp_load_acquire(&heap->operations);
	if (likely(attachment->operations && heap->file_operations == attachment->file->f_op))
		return 0;
	if (mutex_lock_killable(&heap->growing))
		return -EINTR;
	error = dax_heap_ask_once(heap, attachment);
	mutex_unlock(&heap->growing);
	return error;
}

/* The descriptor. */

static void dax_heap_count(struct dax_heap *heap, struct vellum_dax_heap_stat *stat)
{
	struct dax_region *region;
	unsigned int r;

	for (r = 0; r < dax_heap_regions(heap); r++) {
		region = dax_region_of(heap, r * DAX_REGION_SLOTS);
		if (!region)
			continue;
		spin_lock(&region->lock);
		stat->regions++;
		stat->taken += bitmap_weight(region->taken, DAX_REGION_SLOTS);
		stat->attached += bitmap_weight(region->attached, DAX_REGION_SLOTS);
		stat->served += bitmap_weight(region->served, DAX_REGION_SLOTS);
		stat->attaches += region->attaches;
		stat->detaches += region->detaches;
		stat->served_faults += region->served_faults;
		spin_unlock(&region->lock);
	}
}

static long dax_heap_ioctl_stat(struct dax_heap *heap, unsigned long argument)
{
	struct vellum_dax_heap_stat stat = {};
	int size = vellum_copy_sized(&stat, sizeof(stat), sizeof(stat), argument);

	if (size < 0)
		return size;
	memset(&stat, 0, sizeof(stat));
	stat.size = sizeof(stat);
	stat.batch = heap->batch;
	stat.zombies = atomic_read(&heap->zombie_count);
	stat.flushes = atomic64_read(&heap->flushes);
	dax_heap_count(heap, &stat);
	return vellum_answer_sized(argument, size, &stat, sizeof(stat));
}

static long dax_heap_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct dax_heap *heap = file->private_data;

	if (vellum_sized_command(command) == vellum_sized_command(VELLUM_DAX_HEAP_STAT))
		return dax_heap_ioctl_stat(heap, argument);
	/* The process whose page tables these are: as long as it calls, they exist. */
	if (READ_ONCE(heap->mm) != current->mm)
		return -ENXIO;
	switch (vellum_sized_command(command)) {
	case vellum_sized_command(VELLUM_DAX_ATTACH):
		return dax_attach(heap, argument);
	case VELLUM_DAX_DETACH:
		return dax_detach(heap, argument);
	case VELLUM_DAX_REAP:
		dax_reap(heap);
		return 0;
	}
	return -ENOTTY;
}

static int dax_heap_fsync(struct file *file, loff_t start, loff_t end, int datasync)
{
	return dax_attachments_sync(file->private_data, start, end, datasync);
}

static void dax_heap_free(struct kref *references)
{
	struct dax_heap *heap = container_of(references, struct dax_heap, references);

	dax_slots_free(heap);
	if (heap->mm)
		mmdrop(heap->mm);
	module_put(heap->module);
	mutex_destroy(&heap->growing);
	kvfree(heap);
}

void dax_heap_get(struct dax_heap *heap)
{
	kref_get(&heap->references);
}

void dax_heap_put(struct dax_heap *heap)
{
	kref_put(&heap->references, dax_heap_free);
}

static int dax_heap_release(struct inode *inode, struct file *file)
{
	struct dax_heap *heap = file->private_data;

	cancel_delayed_work_sync(&heap->reaping);
	dax_heap_put(heap);
	return 0;
}

static const struct file_operations dax_heap_operations = {
	.owner = THIS_MODULE,
	.release = dax_heap_release,
	.unlocked_ioctl = dax_heap_ioctl,
	.mmap = dax_heap_map,
	.get_unmapped_area = dax_heap_area,
	.fsync = dax_heap_fsync,
	.llseek = noop_llseek,
};

static void dax_heap_reap(struct work_struct *work)
{
	dax_reap(container_of(to_delayed_work(work), struct dax_heap, reaping));
}

long dax_heap_open(unsigned long argument)
{
	struct vellum_dax_heap open = {};
	int size = vellum_copy_sized(&open, sizeof(open), sizeof(open), argument);
	struct dax_heap *heap;
	int descriptor;

	if (size < 0)
		return size;
	if ((open.flags & ~VELLUM_DAX_HEAP_WRITES) || open.batch > VELLUM_DAX_MAX_BATCH)
		return -EINVAL;
	heap = kvzalloc(sizeof(*heap), GFP_KERNEL_ACCOUNT);
	if (!heap)
		return -ENOMEM;
	kref_init(&heap->references);
	heap->writes = open.flags & VELLUM_DAX_HEAP_WRITES;
	heap->batch = open.batch ?: DAX_HEAP_BATCH;
	mutex_init(&heap->growing);
	mutex_init(&heap->reap_lock);
	init_llist_head(&heap->zombies);
	INIT_DELAYED_WORK(&heap->reaping, dax_heap_reap);
	descriptor = anon_inode_getfd("[vellum-dax-heap]", &dax_heap_operations, heap,
				      O_RDWR | O_CLOEXEC);
	if (descriptor < 0)
		dax_heap_put(heap);
	return descriptor;
}
